"""Granite with shared experts, and with windows and attention sinks (granite_swa, granitemoe_swa)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED
from megalith.bridge.families.scaled import GRANITE, GRANITE_MOE
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import gate_up, same, stacked
from megalith.bridge.settings import FixedSettings, Tree, WindowsByLayer
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class SharedSize:
    """Maps `shared_intermediate_size` to the shared expert's width; 0 means no shared expert."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        size = hf_config.get("shared_intermediate_size")
        return {"moe_shared_expert_intermediate_size": size} if size else {}

    def write(self, model: ModelConfig) -> Tree:
        return {"shared_intermediate_size": model.moe_shared_expert_intermediate_size or 0}


WINDOWS = WindowsByLayer(every=4, default=128, pattern=None, unused=128, first=True)


class RopePerLayer(Rope):
    """Maps `layer_rope_theta`, the RoPE base of each layer. A layer with base 0 has no RoPE.

    Layers with a window share one base, and so do the others.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields, bases = super().read(hf_config), hf_config.get("layer_rope_theta")
        if bases is None:
            return fields
        layers = range(hf_config["num_hidden_layers"])
        if len(bases) != len(layers):
            raise ConfigError(
                f"config.json has layer_rope_theta with {len(bases)} entries, but the model has {len(layers)} layers"
            )
        skip = WINDOWS.read(hf_config).get("window_attn_skip_freq", [0] * len(layers))
        by_kind = [{bases[n] for n in layers if bases[n] and skip[n] == kind} for kind in (0, 1)]
        if max(map(len, by_kind)) > 1 or (
            by_kind[0] != by_kind[1] and all(by_kind) and "rope_scaling" in fields
        ):
            raise ConfigError(
                f"config.json has layer_rope_theta {bases!r}, but the layers with a window must have one base, and the "
                "layers without a window one base; with RoPE scaling, all layers must have the same base"
            )
        full, local = (next(iter(kind), None) for kind in by_kind)
        fields["rotary_base"] = full or local or fields["rotary_base"]
        if local and local != fields["rotary_base"]:
            fields["rotary_base_local"] = local
        if not all(bases):
            fields["no_rope_freq"] = [int(not base) for base in bases]
        return fields

    def write(self, model: ModelConfig) -> Tree:
        local = model.rotary_base_local or model.rotary_base
        bases = [model.rotary_base if window is None else local for window in model.windows]
        without = model.layers_without_rope or [0] * model.num_layers
        return super().write(model) | {
            "layer_rope_theta": [0 if skipped else base for base, skipped in zip(bases, without, strict=True)]
        }


# fmt: off
SINKS = {
    "layers.{layer}.self_attention.softmax_offset.weight":
        same("model.layers.{layer}.self_attn.sinks"),
}
GRANITE_MOE_SHARED = Family(
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    tensors={
        **GRANITE_MOE.tensors,
        "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
            gate_up("model.layers.{layer}.shared_mlp.input_linear.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
            same("model.layers.{layer}.shared_mlp.output_linear.weight"),
    },
    settings=(*GRANITE_MOE.settings, SharedSize()),
    tied="lm_head.weight",
    ignored=IGNORED,
)

WITH_WINDOWS = (RopePerLayer(), WINDOWS, FixedSettings(softmax_type="learnable"))
GRANITE_SWA = Family(
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    tensors=GRANITE.tensors | SINKS,
    settings=(*[row for row in GRANITE.settings if not isinstance(row, Rope)], *WITH_WINDOWS),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GRANITE_MOE_SWA = Family(
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    tensors={
        **GRANITE_MOE_SHARED.tensors,
        **SINKS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.block_sparse_moe.router.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked(gate_up("model.layers.{layer}.block_sparse_moe.experts.gate_up_proj")),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked(same("model.layers.{layer}.block_sparse_moe.experts.down_proj")),
    },
    settings=(*[row for row in GRANITE_MOE_SHARED.settings if not isinstance(row, Rope)], *WITH_WINDOWS),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (GRANITE_MOE_SHARED, GRANITE_SWA, GRANITE_MOE_SWA)
