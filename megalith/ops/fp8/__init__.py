"""FP8 matmuls, and what they are made of."""
