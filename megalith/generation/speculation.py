"""Speculative decoding: one forward pass of the model verifies drafts of the next tokens (Leviathan et al. 2023).

     history ──▶ draft tokens d1 … dK ──▶ one pass over [newest, d1 … dK] ──▶ samples x1 … xK+1 ──▶ x1 … up to the first
                                                                                           sample that is not its draft

Each x is sampled from the model's own distribution with the noise of its index in the completion, and is valid if all
drafts before it equal their samples. Completions are thus the same as without drafts, token by token: drafts only
change the number of passes. An n-gram's draft is accepted with its probability, as by rejection sampling. A draft model
samples with the noise of the index that it predicts. The closer its distribution is to the model's, the more often it
proposes x (the Gumbel coupling of Daliri et al. 2024). So do the model's own MTP layers (mtp_drafter.py).

Every row has K drafts in every step, so that shapes are static and a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.config import ModelConfig
from megalith.config.rules.speculation_rules import check_has_mtp, check_lookup, check_rolls_back
from megalith.errors import ConfigError
from megalith.generation.requests import RowSequence, Sampling
from megalith.hardware import to_device
from megalith.models.transformer import Transformer

if TYPE_CHECKING:
    from megalith.generation.engine import Engine

NO_DRAFT = -1
METHODS = "ngram", "draft_model", "mtp"


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding. Names are vLLM's."""

    method: str
    """ngram: copy the tokens that followed an earlier occurrence of the last tokens (prompt lookup). draft_model:
    sample from a smaller model with the same tokenizer. mtp: sample from the model's own layers for multi-token
    prediction."""
    num_speculative_tokens: int = 4
    """Drafts per step."""
    prompt_lookup_max: int = 4
    """ngram: maximum n-gram length."""
    prompt_lookup_min: int = 1
    """ngram: minimum n-gram length."""
    draft_model: Transformer | None = None
    """draft_model: the model. Engines copy its weights."""

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a value out of range, and for a model that cannot verify drafts."""
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_method is {self.method}; choose {', '.join(METHODS[:-1])} or {METHODS[-1]}"
            )
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 1"
            )
        check_lookup(self.prompt_lookup_min, self.prompt_lookup_max)
        if (self.method == "draft_model") != (self.draft_model is not None):
            has = "no draft model is given" if self.draft_model is None else "a draft model is given"
            raise ConfigError(
                f"speculative_method is {self.method}, but {has}; pass a draft model if, and only if, the "
                "method is draft_model"
            )
        if self.method == "mtp":
            check_has_mtp(config)
        check_rolls_back(config, "the model")
        if self.draft_model is not None:
            draft = self.draft_model
            if draft.has_adapters:
                raise ConfigError(
                    "the draft model has adapters, which speculative decoding does not support; merge them first "
                    "(megalith lora merge)"
                )
            check_rolls_back(draft.config, "the draft model")


@dataclass(frozen=True)
class DraftMetrics:
    """Counts of speculative decoding on this rank."""

    row_steps: int
    """Steps, counted once per row in use."""
    drafted: int
    """Drafts that were verified."""
    accepted: int
    """Drafts that became tokens."""

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted / max(self.row_steps, 1)

    @property
    def metrics(self) -> dict[str, float]:
        """Acceptance rates by metric name."""
        return {"draft_acceptance": self.acceptance_rate, "tokens_per_step": self.tokens_per_step}

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_step:.2f} tokens per step, {self.acceptance_rate:.1%} of {self.drafted:,} drafts "
            "accepted"
        )


@dataclass(frozen=True)
class DecodeRows:
    """State of rows 0 to `rows` - 1 of an engine before a step. Tensors are int64 [rows]."""

    token: Tensor  # newest token
    position: Tensor  # its position
    count: Tensor  # sampled tokens
    noise: Tensor  # key of the random numbers
    alive: Tensor  # 0: idle, and at position 0
    settings: Tensor | None  # float32 [4, rows], see ops.gumbel.sample_rows; None: the same for all rows
    longest: int  # maximum length of the sequences


class Drafter(Protocol):
    """Interface of drafters, which propose the next tokens of every row."""

    def reset(self, sampling: Sampling) -> None:
        """Allocate memory if needed, and clear all rows."""

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Assign rows to sequences."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the row of a sequence of `length` tokens to another row."""

    def propose(self, rows: DecodeRows, sampling: Sampling) -> Tensor:
        """Return drafts, int64 [rows, K], with NO_DRAFT where there is none."""

    def add(self, position: Tensor, ids: Tensor) -> None:
        """Record the samples of a step. Samples after the last accepted one are replaced later.

        Args:
            position: position of each row's newest token before the step, int64 [rows].
            ids: the samples that follow it, int64 [rows, K + 1].
        """

    def release(self) -> None:
        """Free the memory of the rows."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Memory of the drafter's weights and of its rows, in bytes."""


class NgramDrafter:
    """Drafter that copies the tokens after an earlier occurrence of the last tokens (`ngram_drafts`)."""

    def __init__(self, speculation: Speculation, rows: int, room: int, device: torch.device):
        self._speculation, self._sizes, self._device = speculation, (rows, room), device
        self._history: Tensor | None = None  # int64 [rows, room]

    def reset(self, sampling: Sampling) -> None:
        if self._history is None:
            self._history = torch.zeros(self._sizes, dtype=torch.int64, device=self._device)

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        whole = [torch.tensor([*sequence.prompt, *sequence.ids]) for _, sequence in begun]
        tokens = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        rows = to_device(torch.tensor([row for row, _ in begun]), self._device)
        self._history[:, : tokens.shape[1]].index_copy_(0, rows, to_device(tokens, self._device))

    def move_row(self, source: int, target: int, length: int) -> None:
        self._history[target] = self._history[source]

    def propose(self, rows: DecodeRows, sampling: Sampling) -> Tensor:
        settings = self._speculation
        return ngram_drafts(
            self._history[: len(rows.token)],
            rows.position,
            settings.num_speculative_tokens,
            settings.prompt_lookup_min,
            settings.prompt_lookup_max,
        )

    def add(self, position: Tensor, ids: Tensor) -> None:
        index = position[:, None] + torch.arange(1, ids.shape[1] + 1, device=ids.device)
        self._history[: len(ids)].scatter_(1, index, ids)

    def release(self) -> None:
        self._history = None

    @property
    def nbytes(self) -> tuple[int, int]:
        return 0, 0 if self._history is None else self._history.nbytes


def ngram_drafts(history: Tensor, last: Tensor, drafts: int, shortest: int, longest: int) -> Tensor:
    """Return the tokens that followed an earlier occurrence of the last tokens (prompt lookup; Saxena 2023).

    The longest match wins; among equally long matches the most recent one wins. If fewer tokens follow a match than
    drafts are needed, the tokens from the match to the end repeat.

    Args:
        history: int64 [rows, room], tokens up to `last`.
        last: int64 [rows], index of the newest token.
        drafts: number of tokens to return per row.
        shortest: minimum length of a match.
        longest: maximum length of a match.

    Returns:
        int64 [rows, drafts]; NO_DRAFT in rows without a match.
    """
    room = history.shape[1]
    index = torch.arange(room, device=history.device)
    matches = index < last[:, None]  # the tokens up to `index` equal the last ones
    length = torch.zeros_like(history)
    for back in range(longest):
        token = history.gather(1, (last - back).clamp(min=0)[:, None])
        matches = matches & (pad(history, (back, 0), value=NO_DRAFT)[:, :room] == token)
        length += matches
    best, at = torch.where(length >= shortest, length * room + index, NO_DRAFT).max(1)
    period = (last - at).clamp(min=1)[:, None]
    source = at[:, None] + 1 + torch.arange(drafts, device=history.device) % period
    return torch.where(best[:, None] >= 0, history.gather(1, source.clamp(max=room - 1)), NO_DRAFT)


class ModelDrafter:
    """Drafter that samples from a smaller model, which has its own engine with the same rows."""

    def __init__(self, engine: Engine, drafts: int):
        self._engine, self._drafts = engine, drafts

    def reset(self, sampling: Sampling) -> None:
        self._engine.reset_state(sampling)

    def fill_rows(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        self._engine.prefill(begun)

    def move_row(self, source: int, target: int, length: int) -> None:
        self._engine.move_row(source, target, length)

    def propose(self, rows: DecodeRows, sampling: Sampling) -> Tensor:
        engine, tokens, drafts = self._engine, rows.token, []
        last_id = engine.config.vocab_size - 1  # the verified model may have more padding entries
        for ahead in range(self._drafts + 1):
            at = (rows.position + ahead * rows.alive)[:, None]
            logits = engine.next_logits(tokens.clamp(max=last_id)[:, None], at, rows.longest + ahead)
            if ahead == self._drafts:  # stored the last draft's key and value, in case it is accepted
                return torch.stack(drafts, 1)
            keys = engine.sampling_keys(rows.noise, rows.count + ahead)
            tokens, _ = engine.sample_logits(logits, keys, sampling, rows.settings)
            drafts.append(tokens)

    def add(self, position: Tensor, ids: Tensor) -> None:
        pass

    def release(self) -> None:
        self._engine.release()

    @property
    def nbytes(self) -> tuple[int, int]:
        memory = self._engine.memory()
        return memory["weights"], memory["cache"]


def accepted_tokens(ids: Tensor, drafts: Tensor, stops: Tensor) -> Tensor:
    """Return the number of valid samples of each row, int64 [rows].

    A sample is valid if all drafts before it equal their samples and none of these ends the completion.

    Args:
        ids: int64 [rows, K + 1], samples.
        drafts: int64 [rows, K].
        stops: bool [rows, K + 1], True for samples that end the completion.
    """
    continues = (ids[:, :-1] == drafts) & ~stops[:, :-1]
    return 1 + continues.long().cumprod(1).sum(1)
