"""Tools that a policy calls while it samples."""
