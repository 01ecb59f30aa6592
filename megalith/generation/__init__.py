"""Sampling with a cache of keys and values."""
