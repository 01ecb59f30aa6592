"""Data parallelism: replicas, FSDP2, and gradient reductions."""
