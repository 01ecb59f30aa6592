"""Engines of rollouts behind one protocol: ours, vLLM, SGLang, and weights on their way to them (docs/engines.md)."""
