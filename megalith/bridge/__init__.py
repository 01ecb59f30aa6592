"""Import from and export to Hugging Face: a table per model family (`families/`), and the streaming converter that uses
them."""
