"""The training loop, the construction of a run and its state, resuming, and recovery from faults."""
