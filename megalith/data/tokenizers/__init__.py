"""One file for each kind of tokenizer; megalith.data.tokenizers.build builds them by name."""
