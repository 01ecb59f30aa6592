"""Advantages of completions and of their tokens, from rewards."""
