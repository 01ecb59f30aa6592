"""Conversion of texts to indexed datasets."""
