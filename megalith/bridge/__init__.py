"""Import from and export to Hugging Face: one table per model family (`families/`), and a streaming converter that
uses them.
"""
