"""Recipes: run files per model, task and number of GPUs, with layouts chosen by the planner."""
