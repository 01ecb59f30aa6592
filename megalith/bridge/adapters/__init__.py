"""Adapters of a run: their settings, their folders, and merging them into the base weights."""
