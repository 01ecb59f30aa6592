"""Accelerate's interface: its scripts, plugin and commands, run by Megalith."""
