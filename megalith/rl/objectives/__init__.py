"""Losses of a step of GRPO, preference training and reward models, and their inputs."""
