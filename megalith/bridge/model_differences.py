"""Settings that make two models differ in function."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megalith.bridge.settings import Tree
from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.rope_scaling import RopeScaling

LATENT_EPSILON = 1e-6  # of the latents' norms in transformers, whatever rms_norm_eps is


def conversion_notes(model: ModelConfig) -> list[str]:
    """Return notes on differences between Megalith's and transformers' computation that config.json cannot express."""
    if not model.multi_latent_attention or model.layernorm_epsilon == LATENT_EPSILON:
        return []
    return [
        f"norms of latents use layernorm_epsilon {model.layernorm_epsilon:g} here, as in "
        f"Megatron-LM and vLLM; transformers uses {LATENT_EPSILON:g}, so its logits differ"
    ]


def function_settings(model: ModelConfig) -> Tree:
    """Return the resolved settings of `model` that affect its function, without settings that it does not use."""
    unread = model.unread(RunConfig(model=model))
    decides = model.fields_deciding(Decides.FUNCTION, Decides.REACH)
    fields = dict(model.resolved(name for name in decides if name not in unread))
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = _with_magnitude(fields["rope_scaling"])
    return fields


def _with_magnitude(scaling: RopeScaling) -> RopeScaling:
    """Return YaRN scaling with an explicit attention_factor, without the rounding error of Megatron's mscale."""
    if scaling.type != "yarn" or (scaling.mscale and scaling.mscale_all_dim):
        return scaling
    factor = round(scaling.attention_factor or scaling.magnitude(), 12)
    return scaling.model_copy(update={"attention_factor": factor})


def differences(model: ModelConfig, other: ModelConfig, ignore: Collection[str] = ()) -> list[str]:
    """Return the settings in which two models compute differently, as text such as `swiglu True, not False`."""
    return [f"{name} {one!r}, not {two!r}" for name, one, two in changed_settings(model, other, ignore)]


def changed_settings(
    model: ModelConfig, other: ModelConfig, ignore: Collection[str] = ()
) -> list[tuple[str, Any, Any]]:
    """Return the settings that make two models differ in function, with both values.

    Settings that one of them does not read (such as expert sizes of a dense model) are ignored.
    """
    one, two = function_settings(model), function_settings(other)
    return [
        (name, one[name], two[name])
        for name in one
        if name in two and one[name] != two[name] and name not in ignore
    ]
