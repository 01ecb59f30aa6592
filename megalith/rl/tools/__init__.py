"""Tools that a policy calls during sampling."""
