"""Megatron-LM's own checkpoints as a source: read without Megatron, and with no code of theirs run."""
