"""One file for each kind of tokenizer; megalith.data.tokenizers.open_tokenizer builds them by name."""
