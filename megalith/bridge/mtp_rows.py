"""Rows of multi-token prediction (MTP) layers as DeepSeek-V3 stores them: numbered after the model's layers.

Each such layer repeats the embedding and the output matrix, which it shares with the model. transformers reads the
layers only to draft tokens, and does not save them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.rows import Rule, same
from megalith.bridge.settings import Tree
from megalith.config import ModelConfig

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
    """Maps `num_nextn_predict_layers`; `default` is the number if config.json omits it."""

    def __init__(self, default: int = 0):
        self._default = default

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count = hf_config.get("num_nextn_predict_layers", self._default)
        return {"mtp_num_layers": count} if count else {}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_nextn_predict_layers": model.mtp_num_layers or 0}
