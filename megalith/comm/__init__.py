"""Mesh axes, and the collectives over them."""
