"""Recomputation and offloading of activations, which trade time for memory."""
