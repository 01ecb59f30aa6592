"""Context parallelism: sequences cut over ranks."""
