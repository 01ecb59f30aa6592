"""Families with experts that are otherwise like Llama: Mixtral; OLMoE, with norms over all queries and all keys."""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import Field, Ours, Theirs, Window

# fmt: off
EXPERTS = {
    "layers.{layer}.mlp.router.weight":
        same("model.layers.{layer}.mlp.gate.weight"),
    "layers.{layer}.mlp.experts.linear_fc1.weight":
        gate_up("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
                "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
    "layers.{layer}.mlp.experts.linear_fc2.weight":
        same("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
}
NORMALIZED = Field("moe_router_pre_softmax", "norm_topk_prob", default=False,
                   values={True: False, False: True})

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    absent={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    tensors={
        **TENSORS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.block_sparse_moe.gate.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            gate_up("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
                    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            same("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"),
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_local_experts", default=8),
        Field("moe_router_topk", "num_experts_per_tok", default=2),
        Window(default=None),
        Theirs(router_jitter_noise=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    absent={"rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **EXPERTS,
        "layers.{layer}.self_attention.q_layernorm.weight":
            same("model.layers.{layer}.self_attn.q_norm.weight"),
        "layers.{layer}.self_attention.k_layernorm.weight":
            same("model.layers.{layer}.self_attn.k_norm.weight"),
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=64),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        NORMALIZED,
        Ours(qk_layernorm=True, qk_layernorm_full_width=True),
        Theirs(attention_bias=False, clip_qkv=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
