"""Rewards of completions: functions, reward models and the processes that run them."""
