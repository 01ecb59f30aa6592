"""The training loop, the construction and state of a run, resuming, and recovery from faults."""
