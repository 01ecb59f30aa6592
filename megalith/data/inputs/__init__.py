"""One reader of text and records: files, folders, object stores and Hugging Face datasets (sources.py)."""
