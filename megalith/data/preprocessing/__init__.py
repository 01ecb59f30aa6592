"""From texts to indexed datasets."""
