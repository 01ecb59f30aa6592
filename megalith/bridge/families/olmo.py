"""OLMo 3 and FlexOlmo of Ai2. OLMo 2 is in llama.py, OLMoE in experts.py.

OLMo 3: OLMo 2 with windows in three of four layers; scaling of RoPE applies to the other layers only.

FlexOlmo: OLMo 2 with OLMoE's experts.
"""

from __future__ import annotations

from megalith.bridge.families.experts import EXPERTS, NORMALIZED
from megalith.bridge.families.llama import IGNORED, OLMO2
from megalith.bridge.family import Family
from megalith.bridge.settings import Field, Rope, RopeByLayer, WindowsByLayer

BASE = 500_000.0  # of RoPE, where config.json is silent

# fmt: off
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={"rms_norm_eps": 1e-5},
    tensors=OLMO2.tensors,
    settings=(
        *[row for row in OLMO2.settings if not isinstance(row, Rope)],
        RopeByLayer(base=BASE, local_base=BASE, nested=True),
        WindowsByLayer(every=4, pattern=None, unused=4096),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FLEX_OLMO = Family(
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    aliases={"num_local_experts": "num_experts"},
    defaults={"rope_theta": BASE},
    tensors={**OLMO2.tensors, **EXPERTS},
    settings=(
        *OLMO2.settings,
        Field("num_experts", "num_experts", default=7),
        Field("moe_router_topk", "num_experts_per_tok", default=5),
        NORMALIZED,
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (OLMO3, FLEX_OLMO)
