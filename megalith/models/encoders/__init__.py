"""Models with an encoder: BERT and T5."""
