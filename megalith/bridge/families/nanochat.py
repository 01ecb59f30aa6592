"""nanochat: Llama with squared ReLU and norms without weights, including one after the embedding and norms of queries
and keys.

RoPE rotates in the opposite direction, which is the usual direction with the halves of each query and key swapped. The
norm of queries and keys follows RoPE, which does not change their length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.families.llama4 import RopeBeforeNorm
from megalith.bridge.family import Family
from megalith.bridge.rows import same, swapped_halves_qkv
from megalith.bridge.settings import Field, FixedSettings, Tree


class NormedRope(RopeBeforeNorm):
    """Maps the RoPE settings like RopeBeforeNorm. In this family, QK norms always follow RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return super().read({**hf_config, "use_qk_norm": True})


# fmt: off
LAYER = "model.layers.{layer}."
NANOCHAT = Family(
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    tensors={
        **TENSORS,
        **{f"layers.{{layer}}.self_attention.linear_qkv.{part}":
            swapped_halves_qkv(*(f"{LAYER}self_attn.{one}_proj.{part}" for one in "qkv"))
            for part in ("weight", "bias")},
        "layers.{layer}.mlp.linear_fc1.weight": same(LAYER + "mlp.fc1.weight"),
        "layers.{layer}.mlp.linear_fc2.weight": same(LAYER + "mlp.fc2.weight"),
    },
    settings=(
        *SIZES,
        UNTIED,
        NormedRope(),
        *ATTENTION_BIAS,
        activation("hidden_act", "relu2"),
        Field("final_logit_softcapping", "final_logit_softcapping", default=15.0),
        FixedSettings(normalization="RMSNorm", add_norm_weight=False, embedding_layernorm=True, qk_l2_norm=True,
                      add_bias_linear=False, hidden_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (NANOCHAT,)
