"""EXAONE 4 and K-EXAONE (exaone_moe) of LG: QK norms, windows in three of four layers, and RoPE only in these.

An EXAONE 4 without windows has RoPE in every layer. EXAONE 4 has its norms after attention and MLP; K-EXAONE has them
before, and has DeepSeek-V3's experts.
"""

from __future__ import annotations

from megalith.bridge.families.experts import (
    EXPERTS,
    SHARED_EXPERTS,
    MlpLayerTypes,
    RouterGroups,
    SharedExperts,
    SigmoidScores,
)
from megalith.bridge.families.llama import IGNORED, OLMO2, QK_NORMS, SETTINGS, TENSORS
from megalith.bridge.families.scaled import RopeInWindows
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, WindowsByLayer, WrittenKeys

WINDOWS = WindowsByLayer(every=4)
ALWAYS_WINDOWS = WindowsByLayer(every=4, unused=4096)

# fmt: off
EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    tensors=OLMO2.tensors,
    settings=(
        *SETTINGS,
        WINDOWS,
        RopeInWindows(WINDOWS, everywhere_without=True),
        FixedSettings(qk_layernorm=True, norm_placement="post"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

EXAONE_MOE = Family(
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    defaults={
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1024, "num_experts_per_tok": 8,
    },
    tensors={
        **TENSORS,
        **QK_NORMS,
        **EXPERTS,
        **SHARED_EXPERTS,
        "layers.{layer}.mlp.router.expert_bias":
            same("model.layers.{layer}.mlp.e_score_correction_bias"),
    },
    settings=(
        *SETTINGS,
        ALWAYS_WINDOWS,
        RopeInWindows(ALWAYS_WINDOWS),
        Field("num_experts", "num_experts", default=64),
        Field("moe_router_topk", "num_experts_per_tok"),
        Field("moe_ffn_hidden_size", "moe_intermediate_size"),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=2.5),
        MlpLayerTypes(dense=1, count="first_k_dense_replace"),
        SharedExperts("num_shared_experts", absent=0, default=1),
        RouterGroups(method=False),
        SigmoidScores(),
        FixedSettings(qk_layernorm=True),
        RequiredKeys(norm_topk_prob=True),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"^mtp\."),
)
# fmt: on


FAMILIES = (EXAONE4, EXAONE_MOE)
