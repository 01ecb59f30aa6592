"""Low-rank adapters: the linears that have them, and their sizes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.dense import Probability
from megalith.config.model import ModelConfig
from megalith.errors import ConfigError, nearest_of

WHOLE = "whole"  # one adapter for all rows of a linear
PARTS = {"linear_qkv": ("q", "k", "v"), "linear_proj": (), "linear_fc1": ("gate", "up"), "linear_fc2": ()}

# Target → linear layers, each with the row ranges that have separate adapters.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    # Megatron's names
    "linear_qkv": {"linear_qkv": ("q", "k", "v")},
    "linear_proj": {"linear_proj": (WHOLE,)},
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
    q_proj."""

    load: str | None = None
    """Folder with adapters in PEFT's format to start from. Sets rank, alpha and targets."""

    def sizes(self, model: ModelConfig) -> dict[str, tuple[int, dict[str, int]]]:
        """Return, for each linear layer with adapters, its input width and the rows of each adapted part."""
        heads, size, hidden = model.num_attention_heads, model.head_dim, model.hidden_size
        values = model.v_head_dim if model.multi_latent_attention else size
        query, key = heads * size, model.query_groups * size
        shapes = {
            "linear_qkv": (hidden, {"q": query, "k": key, "v": key, WHOLE: query + 2 * key}),
            "linear_proj": (heads * values, {WHOLE: hidden}),
            "linear_fc1": (
                hidden,
                {"gate": model.ffn_size, "up": model.ffn_size, WHOLE: model.ffn_size * (1 + model.gated)},
            ),
            "linear_fc2": (model.ffn_size, {WHOLE: hidden}),
        }
        return {
            linear: (shapes[linear][0], {part: shapes[linear][1][part] for part in parts})
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
