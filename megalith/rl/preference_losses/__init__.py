"""Values of `dpo.loss_type`, by family, listed in config/extensions.py."""
