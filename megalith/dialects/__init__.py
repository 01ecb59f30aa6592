"""Interfaces of other systems: each turns what a user of that system types into a RunConfig."""
