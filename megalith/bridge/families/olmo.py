"""OLMo, OLMo 3 and FlexOlmo of Ai2. OLMo 2 is in llama.py, OLMoE in experts.py.

OLMo: Llama with LayerNorm without weights and biases; some releases clamp queries, keys and values.

OLMo 3: OLMo 2 with windows in three of four layers; scaling of RoPE applies to the other layers only.

FlexOlmo: OLMo 2 with OLMoE's experts.
"""

from __future__ import annotations

from megalith.bridge.families.experts import EXPERTS, NORMALIZED
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, OLMO2, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, RopeByLayer
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, WindowsByLayer, WrittenKeys

BASE = 500_000.0  # of RoPE, where config.json is silent

# fmt: off
OLMO = Family(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    tensors=TENSORS,
    settings=(
        *[row for row in SIZES if row.setting != "layernorm_epsilon"],
        UNTIED,
        Rope(),
        *ATTENTION_BIAS,
        Field("clip_qkv", "clip_qkv", default=None),
        FixedSettings(normalization="LayerNorm", add_norm_weight=False, add_norm_bias=False, layernorm_epsilon=1e-5,
                      swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

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


FAMILIES = (OLMO, OLMO3, FLEX_OLMO)
