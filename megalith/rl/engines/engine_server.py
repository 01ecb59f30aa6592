"""The interface of generation servers: requests, and the steps of a weight update."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megalith.errors import ConfigError
from megalith.generation.requests import Sampling
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.json_http import TOKEN_BYTES, JsonServer
from megalith.rl.engines.rollout_engine import Answer
from megalith.rl.engines.weight_stream import WeightBucket


class EngineServer(ABC):
    """Client of one generation server. A subclass implements the server's protocol. All methods raise TrainingError on
    failure.
    """

    name: str
    health_path = "/health"
    route_bytes = 0
    """Maximum bytes of a token's routes in a response. 0: routes are not requested."""

    def __init__(self, url: str):
        self.http = JsonServer(url, self.name)
        self.facts: dict[str, Any] = {}
        """Result of `check`, on every rank; empty if it must be checked again."""
        self.adapter: str | None = None
        """Name of the loaded adapter that completions are sampled with, with weight_sync_method lora."""

    @abstractmethod
    def check(self, deadline: Deadline, method: str) -> dict[str, Any]:
        """Query a running server.

        Returns its properties as JSON values: `workers`, and properties that other methods need.

        Raises:
            TrainingError: if the server returns log-probabilities from before the temperature is applied, or does not
                support rl.weight_sync_method.
        """

    @abstractmethod
    def complete(
        self, prompt: Sequence[int], sampling: Sampling, count: int, seed: int, deadline: Deadline
    ) -> list[Answer]:
        """Return `count` completions of a prompt."""

    def completion_bytes(self, prompt: Sequence[int], sampling: Sampling, count: int) -> int:
        """Return the maximum size of `count` completions in a response."""
        tokens = count * sampling.max_new_tokens
        return tokens * TOKEN_BYTES + (count * len(prompt) + tokens) * self.route_bytes

    @abstractmethod
    def weight_version(self, deadline: Deadline) -> str | None:
        """Return the version of the server's current weights, or None if the server does not report it."""

    @abstractmethod
    def new_group(self, backend: str, address: str, size: int, timeout: float) -> tuple[Any, Callable]:
        """Return an object to pass to `join`, and a function that creates rank 0's side of the group."""

    def group_name(self) -> str:
        """Return a new process group name. A server may still have an earlier group under the old name."""
        return f"megalith_{secrets.token_hex(4)}"

    @abstractmethod
    def join(self, meeting: Any, first_rank: int, size: int, deadline: Deadline) -> None:
        """Have the workers join the group as ranks `first_rank`, `first_rank` + 1, and so on."""

    @abstractmethod
    def begin(self, deadline: Deadline) -> None:
        """Pause generation and prepare the server for weight buckets."""

    def open_memory(self, deadline: Deadline) -> None:
        """Prepare the workers to open tensors by memory handles. Raise ConfigError if they cannot."""
        raise ConfigError(
            f"rl.weight_sync_method is ipc, which {self.name} does not support; choose nccl, gloo or checkpoint"
        )

    @abstractmethod
    def receive(
        self, bucket: WeightBucket, version: int, deadline: Deadline, handles: str | None = None
    ) -> None:
        """Have the workers receive a weight bucket, by broadcast or from `handles`. Returns after they have copied
        it.
        """

    @abstractmethod
    def finish(self, version: int, deadline: Deadline) -> None:
        """Finish the update: drop caches computed with older weights and resume generation."""

    @abstractmethod
    def load_folder(self, path: Path, version: int, deadline: Deadline) -> None:
        """Pause generation, have the server load the weights in a folder, and resume."""

    @abstractmethod
    def load_adapter(self, path: Path, name: str, deadline: Deadline) -> None:
        """Have the server load the adapter in a folder under a new name, and unload `adapter`.

        Each version has its own name, because servers refuse to load a name twice and key cached prefixes by adapter.
        """

    @abstractmethod
    def give_up(self, deadline: Deadline) -> None:
        """Resume the server after a failed update, so that it is usable."""
