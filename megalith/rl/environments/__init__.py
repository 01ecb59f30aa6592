"""The built-in environments of `rl.environment`, one file each, listed in config/extensions.py."""
