"""Settings of distillation (`megalith distill`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.rl_engines import split_urls

WITHOUT_ADAPTERS = "without_adapters"
"""Value of distill.teacher and rl.teacher: the run's own model without its LoRA adapters."""


ON_POLICY = RequiresSetting("on_policy_fraction", greater_than=0)


class DistillConfig(Section):
    """Distillation from a larger model (`megalith distill`; docs/distillation.md)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("teacher_or_logits")

    teacher: str | list[str] | None = None
    """A run, a Hugging Face folder or a Megatron-LM checkpoint with the same vocabulary, which is frozen; the address
    of a server (teacher_engine); or without_adapters, the run's own model without its LoRA adapters. With a list, each
    teacher teaches its own data (teacher_data)."""

    teacher_data: list[str] | None = None
    """One data file per teacher, in the order of teacher: a file of the data paths, given by path or name."""

    teacher_engine: Annotated[Literal["vllm", "sglang"], Decides.NOTHING] = "vllm"
    """Program that serves a teacher whose name is an address, such as http://host:8000."""

    teacher_timeout: Annotated[PositiveFloat, Decides.NOTHING] = 600.0
    """Time limit of a served teacher for the predictions of a step, in seconds."""

    top_k: PositiveInt | None = None
    """Number of the teacher's most likely vocabulary entries to compare; all other entries count as one. A served
    teacher and several teachers require it. Default: all entries."""

    logits_dir: str | None = None
    """Folder of the teacher's stored predictions. `megalith teacher-logits` writes it; `distill` then reads
    it and loads no teacher."""

    logits_top_k: Annotated[PositiveInt, RequiresSetting("logits_dir")] = 64
    """Most likely vocabulary entries stored per token; all others count as one."""

    kd_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """α in the loss of a token: (1 − α) · cross-entropy + α · T² · divergence."""

    temperature: Annotated[float, Field(ge=0.05, le=100)] = 1.0
    """T: both models' logits are divided by it. Above 100, T² amplifies fp32 rounding beyond the divergence."""

    divergence: Literal[
        "forward_kl", "reverse_kl", "generalized_jsd", "skewed_forward_kl", "skewed_reverse_kl"
    ] = "forward_kl"
    """forward_kl averages over the teacher's distribution, reverse_kl over the student's. generalized_jsd
    compares both with their mixture, weighted by beta (GKD). The skewed divergences compare one of the two with a
    mixture weighted by skew (DistiLLM)."""

    beta: Annotated[float, Field(gt=0, lt=1), RequiresSetting("divergence", "generalized_jsd")] = 0.5
    """Weight of the teacher in generalized_jsd's mixture: near 0 it acts like forward_kl, near 1 like reverse_kl."""

    skew: Annotated[
        float, Field(gt=0, lt=1), RequiresSetting("divergence", "skewed_forward_kl", "skewed_reverse_kl")
    ] = 0.1
    """Weight of the divergence's first distribution in its mixture: the teacher's in skewed_forward_kl, the student's
    in skewed_reverse_kl."""

    on_policy_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the samples whose last answer is replaced by one that the student samples (GKD's λ)."""

    max_completion_length: Annotated[PositiveInt, ON_POLICY] = 128
    """Maximum number of tokens that the student samples per answer."""

    sampling_temperature: Annotated[PositiveFloat, ON_POLICY] = 1.0
    """Temperature at which the student samples."""

    generation_rows: Annotated[PositiveInt, ON_POLICY, Decides.NOTHING] = 256
    """Maximum number of answers that a rank samples at a time: the rows of its KV cache."""

    engine: Annotated[Literal["own", "vllm", "sglang"], ON_POLICY] = "own"
    """Program that samples the student's answers: Megalith's engine on the training devices, or servers."""

    engine_url: Annotated[
        str | list[str] | None, RequiresSetting("engine", "vllm", "sglang", strict=True), Decides.NOTHING
    ] = None
    """Address of the server that samples, or several as a list or comma-separated."""

    weight_sync_method: Annotated[
        Literal["nccl", "gloo", "checkpoint"], RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = "nccl"
    """Transfer of the student's weights to a server: broadcast between GPUs (nccl) or through the hosts (gloo), or a
    folder that both see (checkpoint)."""

    weight_sync_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 600.0
    """Time limit of a weight sync in seconds, including the wait for a server that is starting."""

    generation_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 1800.0
    """Time limit of a server for the answers of a step, in seconds."""

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the sampling servers."""
        if self.engine == "own" or self.engine_url is None:
            return []
        return split_urls(self.engine_url)

    @property
    def replays_routes(self) -> bool:
        """False: distillation does not replay the experts that an engine chose."""
        return False

    @property
    def mixture(self) -> float:
        """Weight in the divergence's mixture: `beta` for generalized_jsd, otherwise `skew`."""
        return self.beta if self.divergence == "generalized_jsd" else self.skew

    @property
    def teachers(self) -> list[str]:
        """Teachers of `teacher` as a list."""
        return [self.teacher] if isinstance(self.teacher, str) else list(self.teacher or ())

    @property
    def teacher_or_logits(self) -> str | list[str] | None:
        """Source of the teacher's predictions: distill.logits_dir if set, otherwise distill.teacher."""
        return self.logits_dir or self.teacher


def is_served(teacher: str) -> bool:
    """Return True if a teacher's name is the address of a server."""
    return teacher.startswith(("http://", "https://"))
