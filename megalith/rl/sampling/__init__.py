"""Sampling of rollout batches during training: weight sync, sampling and rewards, and batches sampled ahead."""
