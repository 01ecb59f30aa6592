"""Validation across settings, and notes on settings without effect."""
