"""Data parallelism: replicas, FSDP2, and gradients over all ranks."""
