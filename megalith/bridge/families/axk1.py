"""A.X K1: DeepSeek-V3 with a norm of the experts' output.

transformers names the norm `mlp.post_mlp_layernorm`. In the published files, and in those that transformers writes, it
is not inside the MLP module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import (
    DEEPSEEK_V3,
    ROWS,
    SETTINGS,
    DenseFirst,
    MlpLayerTypes,
    RotaryHeads,
    RouterGroups,
    SigmoidScores,
)
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class QueryLatent(Field):
    """Maps `q_lora_rank`, which every model of this family has."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if hf_config.get(self.key, self.default) is None:
            raise ConfigError(
                "config.json has q_lora_rank null, but models of this family have latent queries; set q_lora_rank"
            )
        return super().read(hf_config)

    def write(self, model: ModelConfig) -> Tree:
        if model.q_lora_rank is None:
            raise ConfigError("its queries have no latent (q_lora_rank None)")
        return super().write(model)


# fmt: off
AXK1 = Family(
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    tensors={
        **ROWS,
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_mlp_layernorm.weight"),
    },
    settings=(
        *[row for row in SETTINGS if not isinstance(row, DenseFirst) and getattr(row, "key", "") != "q_lora_rank"],
        QueryLatent("q_lora_rank", "q_lora_rank", default=1536),
        MlpLayerTypes(1, "first_k_dense_replace"),
        RouterGroups(method=False),
        RotaryHeads(),
        SigmoidScores(),
        RequiredKeys(norm_topk_prob=True, rope_interleave=True),
        FixedSettings(moe_post_layernorm=True),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=DEEPSEEK_V3.ignored[:-1],
)
# fmt: on

FAMILIES = (AXK1,)
