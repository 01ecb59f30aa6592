"""The loop, a run's construction and state, resuming and recovering."""
