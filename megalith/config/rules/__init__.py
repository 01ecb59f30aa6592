"""What must hold between settings, and what is noted where they have no effect."""
