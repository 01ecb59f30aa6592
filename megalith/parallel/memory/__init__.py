"""Activation recomputation and offloading, which trade time for memory."""
