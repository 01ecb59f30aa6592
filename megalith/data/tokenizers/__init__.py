"""Tokenizers, one file per kind. open_tokenizer.py builds them by name."""
