"""ModernBERT's decoder: causal attention, separate query, key and value matrices, and ModernBERT's head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.modernbert import FULL, LAYER, MODERNBERT, SLIDING, LocalAttention
from megalith.bridge.rows import qkv, replace_prefix
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig


class CausalLocalAttention(LocalAttention):
    """Maps `local_attention`, twice the width of a causal window that includes the token itself."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        settings = super().read(hf_config)
        if settings:
            before, _ = settings["window_size"]
            settings["window_size"] = [before - 1, 0]
        return settings

    def write(self, model: ModelConfig) -> Tree:
        kinds = [FULL if window is None else SLIDING for window in model.windows]
        width = {} if model.window_size is None else {"local_attention": 2 * (model.window_size[0] + 1)}
        return {"layer_types": kinds} | width


# fmt: off
ATTENTION = {
    f"layers.{{layer}}.self_attention.linear_qkv.{kind}":
        qkv(*(f"{LAYER}attn.{name}_proj.{kind}" for name in "qkv"))
    for kind in ("weight", "bias")
}
TENSORS = {**replace_prefix(MODERNBERT.tensors, "head.", "lm_head."), **ATTENTION}
TENSORS["vocabulary.bias"] = TENSORS.pop("lm_head.vocabulary.bias")
MODERNBERT_DECODER = replace(
    MODERNBERT,
    architecture="ModernBertDecoderForCausalLM",
    model_type="modernbert-decoder",
    tensors=TENSORS,
    settings=(
        *[row for row in MODERNBERT.settings if not isinstance(row, LocalAttention | RequiredKeys | FixedSettings)],
        CausalLocalAttention(),
        Field("add_output_bias", "decoder_bias", default=True),
        RequiredKeys(attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0),
        FixedSettings(normalization="LayerNorm", gated_linear_unit=True, add_bias_linear=False,
                      embedding_layernorm=True, add_first_input_layernorm=False, add_decoder_lm_head=True,
                      hidden_dropout=0.0, attention_dropout=0.0),
    ),
)
# fmt: on

FAMILIES = (MODERNBERT_DECODER,)
