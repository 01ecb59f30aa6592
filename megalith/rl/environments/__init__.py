"""Built-in values of `rl.environment`, one file each, listed in config/extensions.py."""
