"""Run one training job in many layouts and compare each with one process, to verify that layouts do not change
results."""
