"""Settings of the maximal update parametrization (µP; Yang et al. 2022) and of its form for depth, CompleteP.

With `use_mup`, learning rates, decays and initial values that were tuned on a small model fit a wider one. The base
model is the tuned one. With its sizes, and with mup_base_head_dim equal to its head_dim, nothing changes.

For m = hidden_size / mup_base_hidden_size and d = num_layers / mup_base_num_layers:

    matrices of layers      initial values · m^-1/2; learning rate and epsilon of Adam · 1 / m
    logits                  · 1 / m
    attention scores        √mup_base_head_dim / head_dim^mup_attn_scale_power instead of 1 / √head_dim
    outputs of branches     · d^-mup_depth_alpha (CompleteP)
    parameters of layers    learning rate · d^(mup_depth_alpha - 1), epsilon · d^-mup_depth_alpha (CompleteP)
    all other parameters    epsilon · 1 / m (CompleteP)

Embedding, output matrix, norms and biases keep their rates and initial values. optim/mup_rates.py has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting
from megalith.config.dense_model import DenseModel

MUP = RequiresSetting("use_mup", True, strict=True)


@dataclass(frozen=True)
class MupRatios:
    """Size of a model relative to its base model."""

    width: float
    """Ratio of the hidden sizes."""
    depth: float = 1.0
    """Ratio of the numbers of layers."""
    depth_alpha: float = 1.0
    """Power of `depth` that divides the outputs of branches."""
    scales_depth: bool = False
    """True if mup_base_num_layers is set, so that initial values and rates also depend on the depth (CompleteP)."""
    scales_weight_decay: bool = False
    """Multiply the weight decay of matrices in layers by `width`."""


def is_hidden_matrix(name: str, ndim: int) -> bool:
    """Return True for a matrix in a layer whose inputs and outputs both grow with the width."""
    *_, module, kind = ["", *name.split(".")]
    if not in_layers(name) or ndim < 2 or kind == "bias" or "norm" in module or "lora_" in name:
        return False
    return module not in ("conv", "conv_xbc", "time_step") and ".decay." not in name


def in_layers(name: str) -> bool:
    """Return True for a parameter of a layer."""
    return name.startswith("layers.") or ".layers." in name


class MupModel(DenseModel):
    """Model settings, including the settings of µP."""

    use_mup: bool = False
    """Scale initial values, learning rates, attention scores and logits by the model's width relative to a base model
    (µP), so that tuned learning rates transfer."""

    mup_base_hidden_size: Annotated[PositiveInt | None, MUP] = None
    """µP: hidden_size of the base model, whose learning rates were tuned. Default: this model's, so that only
    attention scores change."""

    mup_base_head_dim: Annotated[PositiveFloat | None, MUP] = None
    """µP: size of a head at which attention scores are divided by its square root, as without µP. Default: 1."""

    mup_attn_scale_power: Annotated[NonNegativeFloat, MUP] = 1.0
    """µP: power of head_dim that divides attention scores. softmax_scale has priority."""

    mup_base_num_layers: Annotated[PositiveInt | None, MUP] = None
    """µP: number of layers of the base model. Scales branches and rates by depth too (CompleteP). Default: no scaling
    by depth."""

    mup_depth_alpha: Annotated[
        float, Field(ge=0.5, le=1.0), RequiresSetting("mup_base_num_layers", strict=True)
    ] = 1.0
    """µP: power of the depth ratio that divides the outputs of branches. 1 is CompleteP."""

    mup_scale_weight_decay: Annotated[bool, Decides.UPDATES, MUP] = False
    """µP: multiply the weight decay of matrices in layers by the width ratio, so that its product with the learning
    rate stays the same (CompleteP)."""

    @property
    def mup_ratios(self) -> MupRatios | None:
        """Size relative to the base model. None without µP."""
        if not self.use_mup:
            return None
        base = self.mup_base_num_layers
        return MupRatios(
            width=self.hidden_size / (self.mup_base_hidden_size or self.hidden_size),
            depth=self.num_layers / base if base else 1.0,
            depth_alpha=self.mup_depth_alpha,
            scales_depth=base is not None,
            scales_weight_decay=self.mup_scale_weight_decay,
        )

    @property
    def plain_attention_scale(self) -> float:
        """Factor on attention scores, not counting YaRN's factor."""
        if not self.use_mup or self.softmax_scale or self.query_pre_attn_scalar:
            return super().plain_attention_scale
        return (self.mup_base_head_dim or 1.0) ** 0.5 / self.head_dim**self.mup_attn_scale_power

    @property
    def logits_divisor(self) -> float:
        """Divisor of the logits."""
        return self.logits_scaling * (self.mup_ratios.width if self.use_mup else 1.0)

    @property
    def branch_factor(self) -> float:
        """Factor on the outputs of attention and MLP before they are added to the residual stream."""
        ratios = self.mup_ratios
        return self.residual_multiplier * (ratios.depth**-ratios.depth_alpha if ratios else 1.0)

    def without_mup(self) -> Self:
        """Return equivalent settings without µP.

        Its factors become scales of logits, layer outputs and attention scores.
        """
        if not self.use_mup:
            return self
        changes: dict[str, Any] = dict(
            logits_scaling=self.logits_divisor, residual_multiplier=self.branch_factor, use_mup=False
        )
        if self.plain_attention_scale != super().plain_attention_scale:
            changes |= dict(softmax_scale=self.plain_attention_scale, query_pre_attn_scalar=None)
        defaults = {name: MupModel.model_fields[name].default for name in MUP_FIELDS}
        return self.model_copy(update=defaults | changes)


MUP_FIELDS = [name for name in MupModel.model_fields if name.startswith("mup_")]
