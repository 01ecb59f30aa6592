"""The OpenAI-compatible server over Megalith's engine (docs/inference.md)."""
