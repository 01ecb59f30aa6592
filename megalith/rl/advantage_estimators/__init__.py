"""The built-in estimators of `rl.advantage_estimator`, one file each, listed in config/extensions.py."""
