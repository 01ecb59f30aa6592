"""The built-in losses of `dpo.loss_type`, grouped by family and listed in config/extensions.py."""
