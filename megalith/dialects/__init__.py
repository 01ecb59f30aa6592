"""Interfaces of other systems: each converts that system's flags or files to a RunConfig."""
