"""Advantages of completions and tokens, computed from rewards."""
