"""Tensor and sequence parallelism: shards matmuls and the vocabulary over ranks."""
