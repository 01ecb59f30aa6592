"""Fine-tuning on chat data, by answers or by preferences: how records become sequences, and what is learned of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megalith.config.base import Decides, Needs, Section


class ChatConfig(Section):
    """What fine-tuning has in common, whatever it learns from chat data. Names are TRL's."""

    decides: ClassVar[Decides] = Decides.SAMPLES
    needs: ClassVar[Needs] = Needs("enabled", True)
    name: ClassVar[str]
    """Of the section."""

    enabled: bool = False
    """data's paths name chat data (JSONL, parquet, a saved dataset). The section's command sets it."""

    chat_template_path: str | None = None
    """A Jinja file, or a folder with chat_template.jinja. Absent: the tokenizer's own."""

    truncation_mode: Literal["keep_start", "keep_end", "drop"] | None = None
    """What becomes of a sample longer than data.seq_length. Absent: it is refused."""

    skip_bad_samples: bool = False
    """Samples that cannot be used are counted and left out. Off: the first one ends the run."""

    num_train_epochs: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Passes over the samples, in place of train.train_iters."""

    packing: bool = False


class SftConfig(ChatConfig):
    """Supervised fine-tuning on conversations (`megalith sft`). Names are TRL's."""

    name: ClassVar[str] = "sft"

    assistant_only_loss: bool = True
    """Only what the assistant says is learned, not what the others say."""

    completion_only_loss: bool = True
    """Of prompt and completion only the completion is learned."""

    packing: bool = True
    """Several whole samples in a sequence, each attending to itself alone. Off: one, and padding."""


class DpoConfig(ChatConfig):
    """Direct preference optimization (`megalith dpo`; docs/preference.md has the formulas). Names are TRL's."""

    name: ClassVar[str] = "dpo"

    packing: bool = False
    """The chosen answers of several pairs in a sequence, their rejected ones in another. Off: one, and padding."""

    loss_type: Annotated[Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"], Decides.UPDATES] = (
        "sigmoid"
    )
    """What is made of a pair's margin; ipo and sigmoid_norm take the mean of an answer's tokens, not their sum."""

    beta: Annotated[PositiveFloat, Decides.UPDATES] = 0.1
    """How closely the policy keeps to the reference: larger is closer."""

    label_smoothing: Annotated[
        NonNegativeFloat, Field(lt=0.5), Needs("loss_type", "sigmoid", "robust"), Decides.UPDATES
    ] = 0.0
    """How often the choice is taken to be wrong: 0 to 0.5."""
