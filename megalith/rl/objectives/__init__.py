"""Losses of GRPO, preference training and reward models, and their inputs."""
