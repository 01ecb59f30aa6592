"""Tensor and sequence parallelism: matmuls and the vocabulary sharded over ranks."""
