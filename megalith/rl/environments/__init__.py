"""Environments by name (`rl.environment`), one file each, listed in config/extensions.py."""
