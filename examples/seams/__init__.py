"""Seams of the model in use: own attention, matmuls and losses."""
