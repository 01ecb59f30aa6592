"""Tensor and sequence parallelism: matmuls and the vocabulary cut over ranks."""
