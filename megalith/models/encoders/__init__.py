"""Models with an encoder: BERT."""
