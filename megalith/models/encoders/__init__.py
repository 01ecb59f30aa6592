"""Models with an encoder: BERT, T5."""
