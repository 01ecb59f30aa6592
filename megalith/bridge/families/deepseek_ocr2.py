"""The language model of DeepSeek-OCR 2: DeepSeek-V2's experts with ordinary attention.

transformers has no class for this language model without the vision tower, so an export without the vision tower is
DeepSeek-MoE.
"""

from __future__ import annotations

from megalith.bridge.families.experts import (
    DEEPSEEK_MOE,
    EXPERTS,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    MlpLayerTypes,
    RouterGroups,
    SharedExperts,
)
from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.settings import FixedSettings, RequiredKeys

# fmt: off
DEEPSEEK_OCR2 = Family(
    architecture="DeepseekOcr2TextModel",
    model_type="deepseek_ocr2_text",
    exported_as=DEEPSEEK_MOE.architecture,
    aliases={"num_experts": "n_routed_experts"},
    defaults={"n_shared_experts": 2},
    tensors={**TENSORS, **EXPERTS, **SHARED_EXPERTS},
    settings=(
        # transformers does not read head_dim
        *[row for row in SETTINGS if getattr(row, "key", "") != "head_dim"],
        *ROUTED_EXPERTS,
        MlpLayerTypes(0),
        SharedExperts(),
        RouterGroups(method=True),
        FixedSettings(moe_router_pre_softmax=True),
        RequiredKeys(mlp_bias=False, attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (DEEPSEEK_OCR2,)
