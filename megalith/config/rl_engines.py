"""Settings of rollout engines (docs/engines.md)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
)

from megalith.config.base import Decides, RequiresSetting, Section

SGLANG = "http://127.0.0.1:30000"  # SGLang's default


def split_urls(addresses: str | list[str]) -> list[str]:
    """Return the addresses in a text or list of texts, each with addresses separated by commas."""
    entries = [addresses] if isinstance(addresses, str) else addresses
    return [url.strip().rstrip("/") for entry in entries for url in entry.split(",")]


class EngineSettings(Section):
    """Engine that samples, vLLM's and SGLang's servers, and weights sent to them. Part of section `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("prompts_or_rollouts")

    engine: Annotated[Literal["own", "vllm", "sglang"], RequiresSetting("prompts")] = "own"
    """Sampling engine: Megalith's own on the trainer's devices, vLLM there or as a server, or an SGLang
    server (docs/engines.md)."""

    engine_url: Annotated[
        str | list[str] | None, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = None
    """Address of the server, or several as a list or comma-separated. Default: vLLM samples in the trainer's
    processes; SGLang is at http://127.0.0.1:30000."""

    vllm_gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1), RequiresSetting("engine", "vllm"), Decides.NOTHING
    ] = 0.3
    """Fraction of each GPU that vLLM in the trainer's processes uses while sampling: weights, KV cache and
    workspace."""

    vllm_sleep_level: Annotated[Literal[0, 1, 2], RequiresSetting("engine", "vllm"), Decides.NOTHING] = 2
    """Sleep level of vLLM in the trainer's processes during training. 1: it frees the KV cache and moves weights to
    host memory. 2: it frees both. 0: it frees nothing."""

    weight_sync_method: Annotated[
        Literal["nccl", "gloo", "checkpoint", "ipc", "lora"],
        RequiresSetting("engine", "vllm", "sglang"),
        Decides.NOTHING,
    ] = "nccl"
    """Transfer of weights to a server: broadcast between GPUs (nccl) or through the hosts (gloo), a folder
    that both see (checkpoint), shared memory of one GPU (ipc), or a folder with only the adapters, which the server
    loads on its own base (lora)."""

    weight_sync_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 600.0
    """Time limit of a weight sync in seconds, including the wait for a server that is starting."""

    weight_sync_delta: Annotated[
        bool, RequiresSetting("engine", "vllm", "sglang", strict=True), Decides.NOTHING
    ] = False
    """Send only the parts of layers whose bits have changed since the last sync, such as those with adapters. Keeps a
    copy of the sent weights in the host's memory of rank 0."""

    generation_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 1800.0
    """Time limit of a server for the completions of a rollout batch, in seconds."""

    max_staleness: Annotated[
        NonNegativeInt, RequiresSetting("engine", "vllm", "sglang", strict=True), Decides.SAMPLES
    ] = 0
    """Rollout batches that a server samples ahead of training (docs/engines.md). Tokens are at most this
    many weight syncs old, as with AReaL's max_head_offpolicyness. Older ones, for example after a resume with a smaller
    value, are excluded from the loss. 0: on policy."""

    @property
    def is_colocated(self) -> bool:
        """True if vLLM samples in the trainer's processes."""
        return self.engine == "vllm" and self.engine_url is None

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the sampling servers."""
        if self.engine == "own" or self.is_colocated:
            return []
        return split_urls(self.engine_url or SGLANG)

    @property
    def server_timeout(self) -> float:
        """Additional time that a step may wait for servers, in seconds."""
        waits = self.prompts is not None and self.engine_urls
        return self.weight_sync_timeout + self.generation_timeout if waits else 0.0
