"""Qwen3-Next: three of four layers are gated delta nets, the others are attention with an output gate.

Experts are as in Qwen2-MoE, with a gated shared expert. Norms multiply by 1 + weight, except the norms in delta nets.
The layer for multi-token prediction has attention. Qwen3.5 (text) has MLPs, and separate projections in delta nets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megalith.bridge.delta_rows import QUERY_KEY_VALUE, QUERY_KEY_VALUE_GATE, STRENGTH_STEP, delta_rows
from megalith.bridge.families.experts import NORMALIZED, QWEN2_MOE, SparseLayers
from megalith.bridge.families.llama import IGNORED, QK_NORMS, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.mtp_rows import QwenMTPLayer, qwen_mtp_rows
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import RowRun, Rule, cut_into, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, check_layer_types
from megalith.config import ModelConfig


class LinearLayers:
    """Maps `layer_types`, or else `full_attention_interval`, to the layers with linear attention."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kinds, interval = hf_config.get("layer_types"), hf_config.get("full_attention_interval") or 4
        if kinds is None:
            kinds = [
                "full_attention" if (n + 1) % interval == 0 else "linear_attention"
                for n in range(hf_config["num_hidden_layers"])
            ]
        check_layer_types(kinds, ("full_attention", "linear_attention"))
        return {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in kinds],
        }

    def write(self, model: ModelConfig) -> Tree:
        linear = model.linear_attention_layers
        kinds = [("full_attention", "linear_attention")[n in linear] for n in range(model.num_layers)]
        return {"layer_types": kinds}


class QwenHybrid(Family):
    """A family whose checkpoints have one MTP layer under `mtp.`."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        rows = [qwen_mtp_rows(self.tensors, layer) for layer in model.mtp_layers]
        return self.tensors if not rows else {**self.tensors, **rows[0]}

    def stores_mtp(self, hf_config: Mapping[str, Any], tensors: Collection[str]) -> bool:
        stated = any(hf_config.get(key) is not None for key in (NEXT_MTP, MTP))
        return not stated and "mtp.fc.weight" in tensors and not hf_config.get("mtp_use_dedicated_embeddings")


NEXT_MTP, MTP = "num_nextn_predict_layers", "mtp_num_hidden_layers"


def _queries_and_gates(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by KV group: queries, gates, key, value. Hugging Face has each head's query followed by its gate."""
    size, in_group = model.head_dim, model.num_attention_heads // model.query_groups
    runs, ours = [], 0
    for group in range(model.query_groups):
        for part in (0, 1):
            for head in range(group * in_group, (group + 1) * in_group):
                runs.append(RowRun(0, (2 * head + part) * size, ours, size))
                ours += size
        for source in (1, 2):
            runs.append(RowRun(source, group * size, ours, size))
            ours += size
    return runs


# fmt: off
DELTA_NETS = (
    LinearLayers(),
    Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
    Field("linear_key_head_dim", "linear_key_head_dim", default=128),
    Field("linear_value_head_dim", "linear_value_head_dim", default=128),
    Field("linear_num_key_heads", "linear_num_key_heads", default=16),
    Field("linear_num_value_heads", "linear_num_value_heads", default=32),
)
OF_LAYER = "model.layers.{layer}."
QWEN3_NEXT = QwenHybrid(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults={"num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True},
    tensors={
        **QWEN2_MOE.tensors,
        **QK_NORMS,
        "layers.{layer}.self_attention.linear_qkv.weight":
            Rule(tuple(OF_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"), _queries_and_gates),
        "layers.{layer}.self_attention.linear_qkv.bias":
            Rule(tuple(OF_LAYER + f"self_attn.{part}_proj.bias" for part in "qkv"), _queries_and_gates),
        "layers.{layer}.self_attention.linear_in.weight":
            same(OF_LAYER + "linear_attn.in_proj_qkvz.weight"),
        "layers.{layer}.self_attention.linear_gates.weight":
            same(OF_LAYER + "linear_attn.in_proj_ba.weight"),
        "layers.{layer}.self_attention.conv.weight":
            Rule((OF_LAYER + "linear_attn.conv1d.weight",), QUERY_KEY_VALUE),
        "layers.{layer}.self_attention.decay.weight":
            same(OF_LAYER + "linear_attn.A_log"),
        "layers.{layer}.self_attention.decay.bias":
            same(OF_LAYER + "linear_attn.dt_bias"),
        "layers.{layer}.self_attention.out_norm.weight":
            same(OF_LAYER + "linear_attn.norm.weight"),
        "layers.{layer}.self_attention.linear_out.weight":
            same(OF_LAYER + "linear_attn.out_proj.weight"),
    },
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        PartialRope(default=0.25),
        Field("num_experts", "num_experts", default=512),
        Field("moe_router_topk", "num_experts_per_tok", default=10),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=512),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=512),
        NORMALIZED,
        SparseLayers(),
        *DELTA_NETS,
        FixedSettings(qk_layernorm=True, moe_shared_expert_gate=True, attention_output_gate=True,
             layernorm_zero_centered_gamma=True),
        QwenMTPLayer(NEXT_MTP),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"mtp\."),
)
# fmt: on


# fmt: off
SEPARATE = {
    "layers.{layer}.self_attention.linear_in.weight":
        Rule((OF_LAYER + "linear_attn.in_proj_qkv.weight", OF_LAYER + "linear_attn.in_proj_z.weight"),
             cut_into(QUERY_KEY_VALUE_GATE, lambda model: (sum(delta_rows(model)[:3]), delta_rows(model)[3]))),
    "layers.{layer}.self_attention.linear_gates.weight":
        Rule((OF_LAYER + "linear_attn.in_proj_b.weight", OF_LAYER + "linear_attn.in_proj_a.weight"),
             STRENGTH_STEP),
}
QWEN3_5 = QwenHybrid(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    tensors={
        **{name: rule for name, rule in QWEN3_NEXT.tensors.items() if ".mlp." not in name},
        **{name: rule for name, rule in TENSORS.items() if ".mlp." in name},
        **SEPARATE,
    },
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        PartialRope(default=0.25),
        *DELTA_NETS,
        FixedSettings(qk_layernorm=True, attention_output_gate=True, layernorm_zero_centered_gamma=True),
        QwenMTPLayer(MTP),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"mtp\."),
)
# fmt: on


# fmt: off
QWEN3_5_MOE = QwenHybrid(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    tensors=QWEN3_NEXT.tensors | SEPARATE,
    settings=(
        *[row for row in SETTINGS
          if not isinstance(row, Rope) and getattr(row, "setting", "") != "ffn_hidden_size"],
        PartialRope(default=0.25),
        Field("num_experts", "num_experts", default=256),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=512),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=512),
        *DELTA_NETS,
        FixedSettings(qk_layernorm=True, moe_shared_expert_gate=True, attention_output_gate=True,
                      layernorm_zero_centered_gamma=True),
        QwenMTPLayer(MTP),
        RequiredKeys(attention_bias=False),
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"mtp\."),
)
# fmt: on


FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
