"""Youtu-LLM: Llama with DeepSeek-V3's latent attention."""

from __future__ import annotations

from megalith.bridge.families.experts import LATENT, LATENT_SIZES, LatentHeads, MscaleRope, RotaryHeads
from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, TIED
from megalith.bridge.family import Family
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys

YOUTU = Family(
    architecture="YoutuForCausalLM",
    model_type="youtu",
    tensors=TENSORS | LATENT,
    settings=(
        *[size for size in SIZES if size.setting not in ("num_query_groups", "kv_channels")],
        LatentHeads(),
        RotaryHeads(),
        TIED,
        MscaleRope(),
        Field("q_lora_rank", "q_lora_rank", default=1536),
        *LATENT_SIZES,
        FixedSettings(
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            multi_latent_attention=True,
        ),
        RequiredKeys(hidden_act="silu", attention_bias=False, rope_interleave=True),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FAMILIES = (YOUTU,)
