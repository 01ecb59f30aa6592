"""Settings of training on chat data, and of SFT. Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PositiveFloat

from megalith.config.base import Decides, RequiresSetting, Section


class ChatConfig(Section):
    """Settings that SFT and DPO share. Names are TRL's."""

    decides: ClassVar[Decides] = Decides.SAMPLES
    requires: ClassVar[RequiresSetting] = RequiresSetting("enabled", True)
    name: ClassVar[str]
    """Name of the section."""
    record_form: ClassVar[str]
    """Form of the records: a key of SAMPLE_FORMS in data/chat/sample_forms.py."""

    enabled: bool = False
    """Read data's paths as chat data (JSONL, parquet, a saved dataset). `megalith sft` and `megalith dpo` set it."""

    chat_template_path: str | None = None
    """A Jinja file, or a folder with chat_template.jinja. Default: the tokenizer's template."""

    truncation_mode: Literal["keep_start", "keep_end", "drop"] | None = None
    """Treatment of samples longer than data.seq_length: cut one end, or drop them. Default: stop with an error."""

    skip_bad_samples: bool = False
    """Skip and count invalid samples. Off: the first one ends the run."""

    num_train_epochs: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Passes over the samples, in place of train.train_iters."""

    packing: bool = False


class SftConfig(ChatConfig):
    """Supervised fine-tuning on conversations (`megalith sft`). Names are TRL's."""

    name: ClassVar[str] = "sft"
    record_form: ClassVar[str] = "conversations"

    assistant_only_loss: bool = True
    """Compute the loss on assistant turns only. Off: on the whole conversation."""

    completion_only_loss: bool = True
    """Compute the loss on the completion only. Off: on the prompt too."""

    loss_type: Annotated[Literal["nll", "dft"], Decides.UPDATES] = "nll"
    """nll: cross-entropy. dft: each token's cross-entropy times its probability (dynamic fine-tuning)."""

    packing: bool = True
    """Pack several whole samples into a row, with separate attention. Off: one padded sample per row."""
