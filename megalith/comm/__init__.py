"""Axes, collectives with gradients, and the ways by which bytes travel."""
