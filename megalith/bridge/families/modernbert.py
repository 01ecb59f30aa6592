"""ModernBERT: a pre-LN encoder with RoPE and gated MLPs.

Most layers have a window to the left and right of each token.

The embedding has a norm, and the first layer has none before its attention. The head before the output matrix has a
dense layer without a bias. Layers with a window have their own base of RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import RopeByLayer
from megalith.bridge.rows import gate_up, qkv, replace_prefix, same
from megalith.bridge.settings import LAYER_KINDS, Field, FixedSettings, RequiredKeys, Tree, check_layer_types
from megalith.config import ModelConfig
from megalith.errors import ConfigError

FULL, SLIDING = LAYER_KINDS
ROPE = RopeByLayer(base=160_000.0, local_base=10_000.0, nested=True)


class LocalAttention:
    """Maps `local_attention`, the full width of a window centered on the token, and the layers that have it."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        width, count = hf_config.get("local_attention", 128) or 0, hf_config["num_hidden_layers"]
        if hf_config.get("sliding_window") not in (None, width // 2):
            raise ConfigError(
                f"config.json has sliding_window {hf_config['sliding_window']} and local_attention {width}, which is "
                "twice the window; remove sliding_window"
            )
        kinds = hf_config.get("layer_types")
        if kinds is None:
            every = hf_config.get("global_attn_every_n_layers", 3)
            if not every:
                raise ConfigError(f"config.json has global_attn_every_n_layers {every}; it must be 1 or more")
            kinds = [SLIDING if layer % every else FULL for layer in range(count)]
        check_layer_types(kinds, LAYER_KINDS)
        if SLIDING not in kinds:
            return {}
        if width < 2:
            raise ConfigError(f"config.json has local_attention {width}; it must be 2 or more")
        skip = [int(kind == SLIDING) for kind in kinds]
        return {"window_size": [width // 2, width // 2], "window_attn_skip_freq": skip}

    def write(self, model: ModelConfig) -> Tree:
        before, after = model.window_size or (0, 0)
        if before != after:
            raise ConfigError(f"its window has different sides (window_size {model.window_size})")
        windows = [model.two_sided_window(layer) for layer in range(model.num_layers)]
        kinds = [FULL if window is None else SLIDING for window in windows]
        return {"layer_types": kinds} | ({"local_attention": 2 * before} if before else {})


class GlobalAndLocalRope:
    """Maps the RoPE bases of layers with and without windows, which older checkpoints store as `local_rope_theta` and
    `global_rope_theta`.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get("rope_scaling"):
            raise ConfigError(
                "config.json has rope_scaling, which scales the rotary positions of layers with a window too and is "
                "not supported; write the scaling into rope_parameters, under full_attention"
            )
        rope_settings, kinds = hf_config.get("rope_parameters") or {}, hf_config.get("layer_types")
        if others := sorted(set(rope_settings) - set(LAYER_KINDS)):
            raise ConfigError(
                f"config.json has rope_parameters with {', '.join(others)}; in this family, they must be inside the "
                f"entry of a kind of layer: {' or '.join(LAYER_KINDS)}"
            )
        bases = {
            FULL: hf_config.get("global_rope_theta") or ROPE.base,
            SLIDING: hf_config.get("local_rope_theta") or ROPE.local_base,
        }
        rope = {kind: {"rope_type": "default", **(rope_settings.get(kind) or {})} for kind in LAYER_KINDS}
        for kind, base in bases.items():
            rope[kind]["rope_theta"] = rope[kind].get("rope_theta") or base
        windows = LocalAttention().read(hf_config)
        return ROPE.read(
            {**hf_config, "rope_parameters": rope, "sliding_window": bool(windows), "layer_types": kinds}
        )

    def write(self, model: ModelConfig) -> Tree:
        return ROPE.write(model)


TOKENS = {
    "pad_token_id": 50283,
    "bos_token_id": 50281,
    "eos_token_id": 50282,
    "cls_token_id": 50281,
    "sep_token_id": 50282,
}


class WrittenTokens:
    """Writes token ids, because transformers rejects null and padding ids outside the vocabulary."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {name: min(token, model.vocab_size - 1) for name, token in TOKENS.items()}


# fmt: off
ENCODER = FixedSettings(
    model_type="bert", normalization="LayerNorm", gated_linear_unit=True, add_bias_linear=False,
    embedding_layernorm=True, add_first_input_layernorm=False, num_tokentypes=0, bert_binary_head=False,
    add_pooler=False, hidden_dropout=0.0, attention_dropout=0.0,
)
LAYER = "model.layers.{layer}."
MODERNBERT = Family(
    architecture="ModernBertForMaskedLM",
    model_type="modernbert",
    tensors={
        "embedding.word_embeddings.weight":
            same("model.embeddings.tok_embeddings.weight"),
        "embedding.layernorm.weight":
            same("model.embeddings.norm.weight"),
        "embedding.layernorm.bias":
            same("model.embeddings.norm.bias"),
        "layers.{layer}.input_layernorm.weight":
            same(f"{LAYER}attn_norm.weight"),
        "layers.{layer}.input_layernorm.bias":
            same(f"{LAYER}attn_norm.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(f"{LAYER}attn.Wqkv.weight"),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv(f"{LAYER}attn.Wqkv.bias"),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(f"{LAYER}attn.Wo.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same(f"{LAYER}attn.Wo.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(f"{LAYER}mlp_norm.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same(f"{LAYER}mlp_norm.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            gate_up(f"{LAYER}mlp.Wi.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            gate_up(f"{LAYER}mlp.Wi.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(f"{LAYER}mlp.Wo.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same(f"{LAYER}mlp.Wo.bias"),
        "final_layernorm.weight":
            same("model.final_norm.weight"),
        "final_layernorm.bias":
            same("model.final_norm.bias"),
        "lm_head.dense.weight":
            same("head.dense.weight"),
        "lm_head.dense.bias":
            same("head.dense.bias"),
        "lm_head.layernorm.weight":
            same("head.norm.weight"),
        "lm_head.layernorm.bias":
            same("head.norm.bias"),
        "lm_head.vocabulary.bias":
            same("decoder.bias"),
        "output_layer.weight":
            same("decoder.weight"),
    },
    settings=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings", default=8192),
        Field("layernorm_epsilon", "norm_eps", default=1e-5),
        Field("add_norm_bias", "norm_bias", default=False),
        Field("init_method_std", "initializer_range", default=0.02),
        activation("hidden_activation", "gelu"),
        Field("add_qkv_bias", "attention_bias", default=False),
        Field("add_proj_bias", "attention_bias", default=False),
        Field("add_mlp_bias", "mlp_bias", default=False),
        Field("add_lm_head_dense_bias", "classifier_bias", default=False),
        Field("lm_head_activation", "classifier_activation", default="gelu",
              values={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        LocalAttention(),
        GlobalAndLocalRope(),
        TIED,
        WrittenTokens(),
        RequiredKeys(decoder_bias=True, attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0),
        ENCODER,
        FixedSettings(add_lm_head=True),
    ),
    tied="decoder.weight",
)
# fmt: on

HEADS = (r"^head\.", r"^decoder\.")  # in files of the model with the head
MODERNBERT_MODEL = replace(
    MODERNBERT,
    architecture="ModernBertModel",
    tensors=replace_prefix(MODERNBERT.tensors, "model."),
    settings=(
        *[
            row
            for row in MODERNBERT.settings
            if getattr(row, "setting", None) not in ("add_lm_head_dense_bias", "lm_head_activation")
            and not isinstance(row, FixedSettings)
        ],
        ENCODER,
        FixedSettings(add_lm_head=False),
    ),
    ignored=HEADS,
    prefix="",
    prefix_with_head="model.",
)

FAMILIES = (MODERNBERT, MODERNBERT_MODEL)
