"""Spellings of GRPO's objective by verl and NeMo-RL, by subject."""
