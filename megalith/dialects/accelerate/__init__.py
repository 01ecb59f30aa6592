"""Accelerate's interface: its scripts, plugin and commands, with Megalith as the engine behind them."""
