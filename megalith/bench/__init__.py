"""How fast this machine is: training, beside peers too, fine-tuning, generation, GRPO, checkpoints and data."""
