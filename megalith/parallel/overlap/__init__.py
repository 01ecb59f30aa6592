"""What hides communication behind computation; imported when asked for."""
