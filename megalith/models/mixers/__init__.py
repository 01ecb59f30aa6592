"""What mixes the tokens of a sequence: attention in its kinds."""
