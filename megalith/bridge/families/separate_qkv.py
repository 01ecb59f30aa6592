"""Families with LayerNorm whose queries, keys and values are three matrices.

StarCoder2: an MLP without a gate, biases everywhere, grouped heads, in some releases a sliding window.

StableLM: Llama with LayerNorm, whose heads turn in part; attention and MLP one behind the other, or side by side behind
one norm.
"""

from __future__ import annotations

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import IGNORED, TENSORS, TIED, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, Ours, PartialRope, Rope, Theirs, Window

# fmt: off
ROWS = {
    **TENSORS,
    "layers.{layer}.input_layernorm.bias":
        same("model.layers.{layer}.input_layernorm.bias"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("model.layers.{layer}.post_attention_layernorm.bias"),
    "final_layernorm.bias":
        same("model.norm.bias"),
}
SIZES = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("attention_dropout", "attention_dropout", default=0.0),
)

STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    absent={"num_key_value_heads": 2},
    tensors={
        **ROWS,
        "layers.{layer}.mlp.linear_fc1.weight":
            same("model.layers.{layer}.mlp.c_fc.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same("model.layers.{layer}.mlp.c_fc.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same("model.layers.{layer}.mlp.c_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same("model.layers.{layer}.mlp.c_proj.bias"),
    },
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("num_query_groups", "num_key_value_heads"),
        Field("kv_channels", "head_dim", default=None),
        Field("layernorm_epsilon", "norm_epsilon", default=1e-5),
        activation("hidden_act", "gelu_pytorch_tanh", tanh="gelu_pytorch_tanh"),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("hidden_dropout", "embedding_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.018042),
        Field("add_qkv_bias", "use_bias", default=True),
        Field("add_proj_bias", "use_bias", default=True),
        Field("add_mlp_bias", "use_bias", default=True),
        TIED,
        Rope(),
        Window(default=None),
        Ours(add_bias_linear=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    absent={"num_key_value_heads": 32},
    tensors=ROWS,
    settings=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size"),
        Field("num_query_groups", "num_key_value_heads"),
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("add_qkv_bias", "use_qkv_bias", default=False),
        Field("parallel_attn_mlp", "use_parallel_residual", default=False),
        Field("shared_layernorm", "use_parallel_residual", default=False),
        UNTIED,
        PartialRope(0.25),
        Ours(swiglu=True, add_bias_linear=False),
        Theirs(hidden_act="silu", qk_layernorm=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
