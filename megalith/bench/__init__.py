"""Benchmarks of this machine: training, other libraries, fine-tuning, generation, GRPO, checkpoints and data."""
