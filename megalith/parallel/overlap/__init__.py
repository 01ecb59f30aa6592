"""Overlap of communication with computation. Imported only if a run uses it."""
