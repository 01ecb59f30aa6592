"""Prompts and rollouts: files, batches and metrics."""
