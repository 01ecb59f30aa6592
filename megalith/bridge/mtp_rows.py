"""Mapping rules of multi-token prediction (MTP) layers. transformers uses these layers only for drafting and does not
save them.

DeepSeek-V3 numbers them after the model's layers. Each repeats the embedding and the output matrix, which it shares
with the model. Qwen3-Next and Qwen3.5 store a single layer under `mtp.`, without copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.rows import Rule, same
from megalith.bridge.settings import Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
MTP: dict[str, Rule] = {
    "layers.{layer}.join.embedding_layernorm.weight":
        same("model.layers.{layer}.enorm.weight"),
    "layers.{layer}.join.hidden_layernorm.weight":
        same("model.layers.{layer}.hnorm.weight"),
    "layers.{layer}.join.linear_join.weight":
        same("model.layers.{layer}.eh_proj.weight"),
    "layers.{layer}.final_layernorm.weight":
        same("model.layers.{layer}.shared_head.norm.weight"),
}
# fmt: on
MTP_COPIES = {
    "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
}


class MTPLayers:
    """Maps `num_nextn_predict_layers`. `default` applies if config.json omits it."""

    def __init__(self, default: int = 0):
        self._default = default

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count = hf_config.get("num_nextn_predict_layers", self._default)
        return {"mtp_num_layers": count} if count else {}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_nextn_predict_layers": model.mtp_num_layers or 0}


QWEN_MTP = {
    "join.embedding_layernorm.weight": same("mtp.pre_fc_norm_embedding.weight"),
    "join.hidden_layernorm.weight": same("mtp.pre_fc_norm_hidden.weight"),
    "join.linear_join.weight": same("mtp.fc.weight"),
    "final_layernorm.weight": same("mtp.norm.weight"),
}


def qwen_mtp_rows(tensors: Mapping[str, Rule], layer: int) -> dict[str, Rule]:
    """Return the mapping rules of an MTP layer in Qwen's checkpoints.

    Args:
        tensors: mapping rules of the model, whose names contain the placeholder `{layer}`.
        layer: number of the MTP layer.
    """
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    rows = {
        name.removeprefix(ours): replace(
            rule, names=tuple(source.replace(theirs, "mtp.layers.0.") for source in rule.names)
        )
        for name, rule in tensors.items()
        if name.startswith(ours)
    }
    return {f"layers.{layer}.{name}": rule for name, rule in (rows | QWEN_MTP).items()}


class QwenMTPLayer:
    """Maps `key`, the number of MTP layers (0 or 1). If config.json omits it, the tensors decide."""

    def __init__(self, key: str):
        self._key = key

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count = hf_config.get(self._key)
        if count not in (None, 0, 1):
            raise ConfigError(
                f"config.json has {self._key} {count}; layers of multi-token prediction share a matrix and norms in "
                "this format, which is supported for a single layer: use 1, or 0 to leave these layers out"
            )
        if count and hf_config.get("mtp_use_dedicated_embeddings"):
            raise ConfigError(
                "config.json has mtp_use_dedicated_embeddings true, but in Megalith MTP layers share the "
                f"model's embedding; set {self._key} to 0 to leave the layer out"
            )
        return {"mtp_num_layers": 1} if count else {}

    def write(self, model: ModelConfig) -> Tree:
        return {self._key: model.mtp_num_layers} if model.mtp_num_layers else {}
