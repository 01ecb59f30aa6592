"""Low-rank adapters: the linears that have them, and their sizes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.dense import Probability
from megalith.config.model import ModelConfig
from megalith.errors import ConfigError, nearest_of

WHOLE = "whole"  # one adapter for all rows of a linear
PARTS = {
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": (),
    "linear_zxbcdt": (),
    "linear_bcx": (),
    "linear_out": (),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": (),
}
MIXERS = {
    "linear_zxbcdt": ("mamba2",),
    "linear_bcx": ("short_conv",),
    "linear_out": ("mamba2", "short_conv"),
}
"""Linears of mixers that are not attention, with these mixers."""

# Target → linear layers, each with the row ranges that have separate adapters.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    # Megatron's names
    "linear_qkv": {"linear_qkv": ("q", "k", "v")},
    "linear_proj": {"linear_proj": (WHOLE,)},
    "linear_zxbcdt": {"linear_zxbcdt": (WHOLE,)},  # Mamba-2
    "linear_bcx": {"linear_bcx": (WHOLE,)},  # short convolution
    "linear_out": {"linear_out": (WHOLE,)},
    "linear_fc1": {"linear_fc1": ("gate", "up")},  # WHOLE for an MLP without a gate
    "linear_fc2": {"linear_fc2": (WHOLE,)},
    # transformers' names
    "q_proj": {"linear_qkv": ("q",)},
    "k_proj": {"linear_qkv": ("k",)},
    "v_proj": {"linear_qkv": ("v",)},
    "o_proj": {"linear_proj": (WHOLE,)},
    "gate_proj": {"linear_fc1": ("gate",)},
    "up_proj": {"linear_fc1": ("up",)},
    "down_proj": {"linear_fc2": (WHOLE,)},
    "qkv_proj": {"linear_qkv": (WHOLE,)},  # Phi-3
    "gate_up_proj": {"linear_fc1": (WHOLE,)},
    "c_attn": {"linear_qkv": (WHOLE,)},  # GPT-2
    "c_fc": {"linear_fc1": (WHOLE,)},
    "c_proj": {"linear_proj": (WHOLE,), "linear_fc2": (WHOLE,)},
}


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained on frozen weights."""

    requires: ClassVar[RequiresSetting] = RequiresSetting("rank", strict=True)

    rank: Annotated[PositiveInt | None, Decides.FUNCTION] = None
    """Rank of the adapters. Default: no adapters; all weights are trained."""

    alpha: Annotated[PositiveFloat, Decides.FUNCTION] = 32.0
    """Numerator of the adapters' scale, alpha / rank."""

    dropout: Annotated[Probability, Decides.UPDATES] = 0.0
    """Dropout probability on the input of adapters."""

    targets: list[str] = Field(
        default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], min_length=1
    )
    """Linear layers with adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or transformers names such as
    q_proj. In Mamba-2 linear_zxbcdt and linear_out, in short convolutions linear_bcx and linear_out."""

    load: str | None = None
    """Folder with adapters in PEFT's format to start from. Sets rank, alpha and targets."""

    def sizes(self, model: ModelConfig) -> dict[str, dict[str, int | None]]:
        """Return, for each linear layer with adapters, the rows of each adapted part; None for all rows."""
        size = model.head_dim
        query, key = model.num_attention_heads * size, model.query_groups * size
        rows = {
            "linear_qkv": {"q": query, "k": key, "v": key},
            "linear_fc1": {"gate": model.ffn_size, "up": model.ffn_size},
        }
        return {
            linear: {part: None if part == WHOLE else rows[linear][part] for part in parts}
            for linear, parts in self.parts(model).items()
        }

    def parts(self, model: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Return, for each linear layer with adapters, the adapted parts of its rows in the order of PARTS.

        Raises ConfigError for a target that is unknown or that the model lacks.
        """
        targeted: dict[str, set[str]] = {}
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(f"lora.targets names {target!r}{nearest_of(target, TARGETS)}")
            for linear, parts in TARGETS[target].items():
                if linear == "linear_fc1" and not model.gated:
                    if target in ("gate_proj", "up_proj"):
                        raise ConfigError(
                            f"lora.targets names {target}, but the MLP has no gate; name linear_fc1, or leave it out"
                        )
                    parts = (WHOLE,)
                mixers = MIXERS.get(linear)
                if mixers is not None and not set(mixers) & set(model.recurrent_mixers):
                    raise ConfigError(
                        f"lora.targets names {target}, but no layer of the model has {' or '.join(mixers)}; leave it "
                        "out"
                    )
                targeted.setdefault(linear, set()).update(parts)
        for linear, parts in targeted.items():
            if WHOLE in parts and len(parts) > 1:
                raise ConfigError(
                    f"lora.targets {', '.join(self.targets)} gives {linear} an adapter for all its rows and others "
                    "for some of them; name either the fused matrix or its parts"
                )
        return {
            linear: tuple(part for part in (WHOLE, *order) if part in targeted[linear])
            for linear, order in PARTS.items()
            if linear in targeted
        }
