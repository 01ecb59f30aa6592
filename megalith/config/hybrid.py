"""Settings of mixers other than attention: gated delta nets, Mamba-2, short convolutions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalith.config.base import RequiresSetting, Resolved, Section
from megalith.config.mup import MupModel

PATTERN_LAYERS = {
    "M": "mamba2",
    "G": "gated_delta_net",
    "*": "attention",
    "-": "mlp",
    "E": "experts",
}
"""Layers by their letter in hybrid_layer_pattern, as in Megatron-LM."""
RECURRENT = ("gated_delta_net", "kimi_delta_attention", "mamba2", "short_conv")
DELTA_RULES = ("gated_delta_net", "kimi_delta_attention")


class RequiresMixer(RequiresSetting):
    """Annotation of a field that has an effect only if a layer has one of these mixers."""

    def __init__(self, *mixers: str):
        super().__init__("experimental_attention_variant", *mixers, strict=True)

    def current_value(self, section: Section, config: Section | None) -> Any:
        return section.recurrent_mixers or None


LINEAR = RequiresMixer()
DELTA = RequiresMixer(*DELTA_RULES)
MAMBA = RequiresMixer("mamba2")
CONVOLUTION = RequiresMixer("short_conv")
GATED = RequiresMixer("gated_delta_net")
VARIANT = RequiresSetting("experimental_attention_variant", strict=True)
PARALLEL = RequiresSetting("parallel_mixers", True, strict=True)


class HybridModel(MupModel):
    """Model settings for layers with a mixer other than attention, and for attention's output gate (Qwen3-Next).

    A gated delta net (Yang et al. 2024) and a state space model (Mamba-2, Dao and Gu 2024) store one matrix per head
    for all earlier tokens. The cost per token therefore does not depend on the sequence length.
    """

    experimental_attention_variant: (
        Literal["gated_delta_net", "kimi_delta_attention", "mamba2", "short_conv"] | None
    ) = None
    """Mixer that replaces attention in the layers of linear_attention_freq: a gated delta net (Qwen3-Next), Kimi Delta
    Attention (Kimi-Linear), a state space model (`mamba2`: Bamba, Granite 4), or a short convolution (LFM2)."""

    linear_attention_freq: Annotated[
        PositiveInt | list[Literal[0, 1]],
        VARIANT,
        Resolved("linear_attention_layers"),
    ] = 4
    """Layers with this mixer: all but every N-th, or a list with one entry per layer, 1 = with this mixer."""

    hybrid_layer_pattern: Annotated[
        str | None,
        RequiresSetting("experimental_attention_variant", None, strict=True),
    ] = None
    """Layers with a single branch, one letter per layer: M Mamba-2, G gated delta net, * attention, - MLP, E experts
    (Nemotron-H). Default: every layer has a mixer and an MLP or experts. Layers of mtp_num_layers have attention and
    experts, or attention and an MLP if the model has no experts."""

    parallel_mixers: Annotated[
        bool, RequiresSetting("experimental_attention_variant", "mamba2", strict=True)
    ] = False
    """In the layers of linear_attention_freq, run the mixer in parallel with attention instead of replacing it
    (Falcon-H1)."""

    linear_conv_kernel_dim: Annotated[PositiveInt, LINEAR] = 4
    """Width of the mixer's causal convolution, in tokens, including the current one."""

    linear_key_head_dim: Annotated[PositiveInt, DELTA] = 128
    """Size of a query and key head."""

    linear_value_head_dim: Annotated[PositiveInt, DELTA] = 128
    """Size of a value head."""

    linear_num_key_heads: Annotated[PositiveInt, DELTA] = 16
    """Number of query and key heads."""

    linear_num_value_heads: Annotated[PositiveInt, DELTA] = 32
    """Number of value heads, a multiple of linear_num_key_heads; several value heads share one key head."""

    linear_allow_neg_eigval: Annotated[bool, GATED] = False
    """Gated delta net: write strengths from 0 to 2 instead of 0 to 1, so that transitions can have negative eigenvalues
    (OLMo Hybrid; Grazzi et al. 2024)."""

    linear_norm_epsilon: Annotated[PositiveFloat | None, DELTA, Resolved("output_norm_epsilon")] = None
    """Constant added to the variance in the norms of delta nets' outputs. Default: layernorm_epsilon."""

    linear_norm_placement: Annotated[
        Literal["pre", "post", "sandwich"] | None,
        VARIANT,
        RequiresSetting("parallel_attn_mlp", False, strict=True),
        RequiresSetting("parallel_mixers", False, strict=True),
        RequiresSetting("apply_residual_connection_post_layernorm", False, strict=True),
        Resolved("other_norm_placement"),
    ] = None
    """Position of norms in the layers with this mixer, if it differs from norm_placement (OLMo Hybrid: `pre`, with
    norm_placement `post`)."""

    mamba_state_dim: Annotated[PositiveInt, MAMBA] = 128
    """Mamba-2: size of the state per element of a head."""

    mamba_head_dim: Annotated[PositiveInt, MAMBA] = 64
    """Mamba-2: size of a head."""

    mamba_num_heads: Annotated[PositiveInt | None, MAMBA, Resolved("mamba_heads")] = None
    """Mamba-2: number of heads. Default: 2 · hidden_size / mamba_head_dim."""

    mamba_num_groups: Annotated[PositiveInt, MAMBA] = 8
    """Mamba-2: number of groups of heads that share B and C; a divisor of the number of heads."""

    mamba_conv_bias: Annotated[bool, MAMBA] = True
    """Mamba-2: add a bias to the convolution."""

    mamba_proj_bias: Annotated[bool, MAMBA] = False
    """Mamba-2: add a bias to the input projection."""

    mamba_out_bias: Annotated[bool, MAMBA] = False
    """Mamba-2: add a bias to the output projection."""

    mamba_rms_norm: Annotated[bool, MAMBA] = True
    """Mamba-2: normalize the output per group. Otherwise it is only multiplied by its gate (Falcon-H1)."""

    mamba_norm_before_gate: Annotated[bool, MAMBA] = False
    """Mamba-2: normalize before multiplying by the gate, not after."""

    mamba_dt_limit: Annotated[
        Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)] | None, MAMBA
    ] = None
    """Mamba-2: smallest and largest step size (dt). Default: no limits."""

    short_conv_bias: Annotated[bool, CONVOLUTION] = False
    """Short convolution: add biases to the convolution and its projections."""

    ssm_in_multiplier: Annotated[PositiveFloat, MAMBA] = 1.0
    """Mamba-2: factor on the input (Falcon-H1)."""

    ssm_out_multiplier: Annotated[PositiveFloat, MAMBA] = 1.0
    """Mamba-2: factor on the output (Falcon-H1)."""

    ssm_multipliers: Annotated[
        Annotated[list[PositiveFloat], Field(min_length=5, max_length=5)] | None, MAMBA
    ] = None
    """Mamba-2: factors on the input projection's gate z, x, B, C and step size (Falcon-H1). Default: 1."""

    attention_in_multiplier: Annotated[PositiveFloat, PARALLEL] = 1.0
    """Factor on attention's input (Falcon-H1)."""

    attention_out_multiplier: Annotated[PositiveFloat, PARALLEL] = 1.0
    """Factor on attention's output (Falcon-H1)."""

    key_multiplier: PositiveFloat = 1.0
    """Additional factor on attention scores, besides softmax_scale (Falcon-H1)."""

    mlp_multipliers: Annotated[
        Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)] | None,
        RequiresSetting("gated", True, strict=True),
    ] = None
    """Factors on the gates of MLPs and on their outputs (Falcon-H1). Default: 1."""

    attention_output_gate: bool = False
    """Multiply attention's output elementwise by a sigmoid gate (Qwen3-Next)."""

    @property
    def pattern_layers(self) -> list[str] | None:
        """Branch of every layer by name (PATTERN_LAYERS); None: every layer has a mixer and an MLP or experts."""
        if self.hybrid_layer_pattern is None:
            return None
        return [PATTERN_LAYERS[letter] for letter in self.hybrid_layer_pattern]

    @property
    def linear_attention_layers(self) -> list[int]:
        """Indices of the layers with a mixer that is not attention."""
        pattern = self.pattern_layers
        if pattern is not None:
            return [layer for layer, branch in enumerate(pattern) if branch in RECURRENT]
        if self.experimental_attention_variant is None:
            return []
        frequency = self.linear_attention_freq
        if isinstance(frequency, list):
            return [layer for layer, is_linear in enumerate(frequency) if is_linear]
        return [layer for layer in range(self.num_layers) if (layer + 1) % frequency]

    @property
    def output_norm_epsilon(self) -> float | None:
        """linear_norm_epsilon if it differs from layernorm_epsilon, else None."""
        return self.linear_norm_epsilon if self.linear_norm_epsilon != self.layernorm_epsilon else None

    @property
    def other_norm_placement(self) -> str | None:
        """linear_norm_placement if it differs from norm_placement, else None."""
        return self.linear_norm_placement if self.linear_norm_placement != self.norm_placement else None

    def norm_placement_in(self, layer: int) -> str:
        """Return the position of norms in layer number `layer` (from 0)."""
        is_linear = self.other_norm_placement is not None and layer in self.linear_attention_layers
        return self.other_norm_placement if is_linear else self.norm_placement

    def norms_in_layer(self, layer: int) -> int:
        """Return the number of norms over the residual stream in layer number `layer` (from 0)."""
        return 4 if self.norm_placement_in(layer) == "sandwich" else 1 if self.parallel_attn_mlp else 2

    def recurrent_mixer(self, layer: int) -> str | None:
        """Return the mixer of layer number `layer` (from 0) that is not attention, None without one."""
        if layer not in self.linear_attention_layers:
            return None
        pattern = self.pattern_layers
        return self.experimental_attention_variant if pattern is None else pattern[layer]

    def layers_with(self, mixer: str) -> list[int]:
        """Return the indices of the layers with this mixer, one of RECURRENT."""
        return [layer for layer in self.linear_attention_layers if self.recurrent_mixer(layer) == mixer]

    @property
    def recurrent_mixers(self) -> list[str]:
        """Mixers of the model that are not attention."""
        present = self.pattern_layers
        if present is None:
            present = [self.experimental_attention_variant]
        return [mixer for mixer in RECURRENT if mixer in present]

    def has_attention(self, layer: int) -> bool:
        """Return True if layer number `layer` (from 0) has attention."""
        pattern = self.pattern_layers
        if pattern is not None:
            return layer >= self.num_layers or pattern[layer] == "attention"
        return self.parallel_mixers or layer >= self.num_layers or layer not in self.linear_attention_layers

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers with attention, including MTP layers."""
        return [layer for layer in range(self.num_layers) if self.has_attention(layer)] + self.mtp_layers

    def has_mlp(self, layer: int) -> bool:
        """Return True if layer number `layer` (from 0) has an MLP or experts."""
        pattern = self.pattern_layers
        return pattern is None or layer >= self.num_layers or pattern[layer] in ("mlp", "experts")

    @property
    def mamba_heads(self) -> int:
        """Number of Mamba-2's heads."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return self.key_multiplier * super().attention_scale
