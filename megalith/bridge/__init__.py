"""Hugging Face in and out: a table a family (`families/`), and the streaming converter that works by them."""
