"""Llama with experts in the place of its MLP: Mixtral, OLMoE, Qwen2 and Qwen3.

OLMoE has norms over all queries and all keys besides, the Qwens what they have without experts; Qwen2 a shared expert
that a sigmoid gate weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, QK_NORMS, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import EveryLayer, Field, Ours, Theirs, Tree, Window
from megalith.config import ModelConfig

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
    tensors={**TENSORS, **EXPERTS, **QK_NORMS},
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


class SparseLayers:
    """Every `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        step, dense = theirs.get("decoder_sparse_step") or 1, theirs.get("mlp_only_layers") or ()
        layers = range(theirs["num_hidden_layers"])
        return {"moe_layer_freq": [int(n not in dense and (n + 1) % step == 0) for n in layers]}

    def write(self, model: ModelConfig) -> Tree:
        dense = sorted(set(range(model.num_layers)) - set(model.expert_layers))
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    absent={"num_key_value_heads": 4},
    tensors={**TENSORS, **EXPERTS, **QK_NORMS},
    settings=(
        *SETTINGS,
        Field(
            "num_experts", "num_experts", default=128, other="num_local_experts"
        ),  # transformers 5 writes the other
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=768),
        NORMALIZED,
        SparseLayers(),
        Ours(qk_layernorm=True),
        Theirs(attention_bias=False, use_sliding_window=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


# fmt: off
QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    absent={"num_key_value_heads": 16},
    tensors={
        **TENSORS,
        **EXPERTS,
        "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
            gate_up("model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
                    "model.layers.{layer}.mlp.shared_expert.up_proj.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
            same("model.layers.{layer}.mlp.shared_expert.down_proj.weight"),
        "layers.{layer}.mlp.shared_expert_gate.weight":
            same("model.layers.{layer}.mlp.shared_expert_gate.weight"),
    },
    settings=(
        *SETTINGS,
        Field("num_experts", "num_experts", default=60),
        Field("moe_router_topk", "num_experts_per_tok", default=4),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1408),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=5632),
        NORMALIZED,
        SparseLayers(),
        Field("add_qkv_bias", "qkv_bias", default=True),
        Ours(moe_shared_expert_gate=True),
        Theirs(use_sliding_window=False),
        EveryLayer("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
