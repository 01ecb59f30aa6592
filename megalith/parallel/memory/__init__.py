"""What trades time for memory: recomputation and offloaded activations."""
