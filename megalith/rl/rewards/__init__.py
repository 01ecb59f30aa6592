"""Rewards of completions: functions, reward models and their processes."""
