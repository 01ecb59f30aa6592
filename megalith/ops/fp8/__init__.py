"""FP8 matmuls and casts."""
