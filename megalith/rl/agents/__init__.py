"""Rollouts with tools, environments and several turns (docs/agents.md)."""
