"""Ling 2.0 (BailingMoeV2) and Sarvam.

Ling 2.0 and Sarvam-30B: GLM-4.5's attention and experts, with one matrix for queries, keys and values. Ling's class is
in the model's own folder, not in transformers. Sarvam-105B: DeepSeek-V3 with other defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import (
    DEEPSEEK_V3,
    SHARED_EXPERTS,
    DenseFirst,
    MscaleRope,
    RotaryHeads,
    RouterGroups,
    SharedExperts,
    SigmoidScores,
)
from megalith.bridge.families.glm import GLM4_MOE, WITHOUT_ROPE
from megalith.bridge.families.llama import IGNORED
from megalith.bridge.families.more_experts import RotaryDim
from megalith.bridge.family import Family
from megalith.bridge.mtp_rows import MTPLayers
from megalith.bridge.rope_settings import PartialRope
from megalith.bridge.rows import qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys

# fmt: off
IN_ATTENTION = "model.layers.{layer}.attention."
TENSORS = {
    **GLM4_MOE.tensors,
    **SHARED_EXPERTS,
    "embedding.word_embeddings.weight":
        same("model.word_embeddings.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv(f"{IN_ATTENTION}query_key_value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv(f"{IN_ATTENTION}query_key_value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same(f"{IN_ATTENTION}dense.weight"),
    "layers.{layer}.self_attention.q_layernorm.weight":
        same(f"{IN_ATTENTION}query_layernorm.weight"),
    "layers.{layer}.self_attention.k_layernorm.weight":
        same(f"{IN_ATTENTION}key_layernorm.weight"),
    "layers.{layer}.mlp.router.expert_bias":
        same("model.layers.{layer}.mlp.gate.expert_bias"),
}
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers",
           "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
SARVAM_MOE = Family(
    architecture="SarvamMoEForCausalLM",
    transformers_class="Glm4MoeForCausalLM",
    model_type="sarvam_moe",
    aliases={**ALIASES, "use_qkv_bias": "attention_bias"},
    defaults={"num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 8e6,
              "initializer_range": 0.006, "n_routed_experts": 128, "num_experts_per_tok": 6,
              "moe_intermediate_size": 1024, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
              "first_k_dense_replace": 1, "use_qk_norm": True},
    tensors=TENSORS,
    settings=(
        *[row for row in GLM4_MOE.settings if not isinstance(row, PartialRope | MTPLayers)],
        PartialRope(1.0),
        MTPLayers(),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

LING2 = Family(
    architecture="BailingMoeV2ForCausalLM",
    model_type="bailing_moe",
    defaults={"head_dim": None, "first_k_dense_replace": 0, "rms_norm_eps": 1e-6},
    tensors=TENSORS,
    settings=(
        *[row for row in WITHOUT_ROPE if not isinstance(row, FixedSettings)],
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False),
        RotaryDim(1.0),
        Field("num_experts", "num_experts"),
        Field("moe_router_topk", "num_experts_per_tok"),
        Field("moe_ffn_hidden_size", "moe_intermediate_size"),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
        Field("add_qkv_bias", "use_qkv_bias", default=False),
        Field("qk_layernorm", "use_qk_norm", default=False),
        Field("hidden_dropout", "embedding_dropout", default=0.0),
        Field("hidden_dropout", "output_dropout", default=0.0),
        RouterGroups(method=False),
        SigmoidScores(),
        DenseFirst(),
        SharedExperts("num_shared_experts", absent=0),
        RequiredKeys(norm_topk_prob=True, use_bias=False, score_function="sigmoid",
                     moe_router_enable_expert_bias=True, use_sliding_window=False),
        WrittenKeys(num_nextn_predict_layers=0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


class DeepseekYarn(MscaleRope):
    """Maps RoPE scaling like MscaleRope, but named `deepseek_yarn` as in Sarvam's checkpoints."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        old = hf_config.get("rope_scaling") or {}
        if "deepseek_yarn" in (old.get("type"), old.get("rope_type")):
            old = {key: value for key, value in old.items() if key not in ("type", "rope_type")}
            hf_config = {**hf_config, "rope_scaling": {**old, "rope_type": "yarn"}}
        return super().read(hf_config)


SARVAM_MLA = Family(
    architecture="SarvamMLAForCausalLM",
    transformers_class="DeepseekV3ForCausalLM",
    model_type="sarvam_mla",
    aliases=ALIASES,
    defaults={"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
              "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
              "routed_scaling_factor": 2.5, "q_lora_rank": None, "initializer_range": 0.006},
    tensors=DEEPSEEK_V3.tensors,
    settings=(  # head_dim is not read: the published file has the latent's width there, for vLLM
        *[row for row in DEEPSEEK_V3.settings if not isinstance(row, MscaleRope | RotaryHeads | MTPLayers)],
        MTPLayers(),
        DeepseekYarn(),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (SARVAM_MOE, LING2, SARVAM_MLA)
