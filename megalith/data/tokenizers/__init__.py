"""One file for each kind of tokenizer; megalith.data.tokenizer builds them by name."""
