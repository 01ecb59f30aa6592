"""Adapters of a run: their settings, their folders, and merging them with their base."""
