"""Supervised fine-tuning: how conversations become sequences, and which of their tokens are learned."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PositiveFloat

from megalith.config.base import Decides, Needs, Section


class SftConfig(Section):
    """Supervised fine-tuning on conversations (`megalith sft`). Names are TRL's."""

    decides: ClassVar[Decides] = Decides.SAMPLES
    needs: ClassVar[Needs] = Needs("enabled", True)

    enabled: bool = False
    """data's paths name conversations (JSONL, parquet, a saved dataset). `megalith sft` sets it."""

    chat_template_path: str | None = None
    """A Jinja file, or a folder with chat_template.jinja. Absent: the tokenizer's own."""

    assistant_only_loss: bool = True
    """Only what the assistant says is learned, not what the others say."""

    completion_only_loss: bool = True
    """Of prompt and completion only the completion is learned."""

    truncation_mode: Literal["keep_start", "keep_end", "drop"] | None = None
    """What becomes of a sample longer than data.seq_length. Absent: it is refused."""

    packing: bool = True
    """Several whole samples in a sequence, each attending to itself alone. Off: one, and padding."""

    skip_bad_samples: bool = False
    """Samples that cannot be used are counted and left out. Off: the first one ends the run."""

    num_train_epochs: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Passes over the samples, in place of train.train_iters."""
