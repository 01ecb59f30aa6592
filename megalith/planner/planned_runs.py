"""Builds configurations to plan: a preset, or a run with another batch size or sequence length."""

from __future__ import annotations

from typing import Any

from megalith.config import RunConfig


def with_batch(config: RunConfig, seq_length: int | None, global_batch_size: int | None) -> RunConfig:
    """Return `config` with another sequence length and batch size. Increases max_position_embeddings if needed."""
    settings: dict[str, Any] = {}
    if seq_length is not None:
        settings["data.seq_length"] = seq_length
        if (config.model.max_position_embeddings or 0) < seq_length:
            settings["model.max_position_embeddings"] = seq_length
    if global_batch_size is not None:
        settings["train.global_batch_size"] = global_batch_size
    return config.with_settings(settings)


def preset_config(preset: str, gpus: int, seq_length: int | None, global_batch_size: int | None) -> RunConfig:
    """Return a bf16 pre-training job of a preset. By default sequences have up to 8,192 tokens, and the batch has one
    sequence per 8 GPUs.
    """
    config = RunConfig.from_tree(
        {
            "model": {"preset": preset},
            "data": {"mock": True},
            "optim": {"lr": 1e-4},
            "train": {"train_iters": 1, "precision": "bf16", "global_batch_size": 1},
        }
    )
    seq = seq_length or min(config.model.max_position_embeddings or 4096, 8192)
    batch = global_batch_size or max(64, 2 ** (max(gpus // 8, 1) - 1).bit_length())
    return with_batch(config, seq, batch)
