"""Device state of logits processing: penalties, token counts, biases and mask per row.

The state of a feature is allocated when a sequence first needs it, in static tensors as CUDA graphs require. It covers
this rank's vocabulary entries. A row without logits processing has values that leave its logits unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.generation.logits_processing import OFF, LogitsProcessing
from megalith.generation.requests import RowSequence
from megalith.hardware import to_device
from megalith.ops.penalties import allowed_entries, penalize


class UsedParts(NamedTuple):
    """Features of logits processing that a decode step uses."""

    penalties: bool = False
    biases: bool = False
    masks: bool = False

    @classmethod
    def by(cls, sequences: Iterable[RowSequence | None]) -> UsedParts:
        """Return the features of logits processing that at least one of these sequences needs."""
        processing = {id(one.processing): one.processing for one in sequences if one is not None}
        return cls(*map(any, zip(*map(cls.of, processing.values())))) if processing else cls()

    @classmethod
    def of(cls, processing: LogitsProcessing) -> UsedParts:
        """Return the features of logits processing that these settings need."""
        return cls(processing.has_penalties, bool(processing.biases), processing.needs_masks)


NO_PARTS = UsedParts()


@dataclass
class _Penalties:
    settings: Tensor  # float32 [3, rows]: repetition, presence and frequency penalty
    in_prompt: Tensor  # bool [rows, local entries]
    counts: Tensor  # int32 [rows, local entries], of the completion


class LogitsState:
    """Logits processing state for the rows of an engine."""

    def __init__(self, rows: int, first: int, entries: int, vocab_size: int, device: torch.device):
        """Start without memory for any feature.

        Args:
            rows: number of rows.
            first: index of this rank's first vocabulary entry.
            entries: number of this rank's entries.
            vocab_size: entries of all ranks, with padding.
            device: device of the state.
        """
        self._rows, self._first, self._entries = rows, first, entries
        self._vocab_size, self._device = vocab_size, device
        self._penalties: _Penalties | None = None
        self._biases: Tensor | None = None  # float32 [rows, local entries]
        self._masks: Tensor | None = None  # int32 [rows, words] of all entries

    def allocate(self, used: UsedParts) -> None:
        """Allocate memory for these features, initialized so that logits do not change."""
        sizes, device = (self._rows, self._entries), self._device
        if used.penalties and self._penalties is None:
            settings = torch.tensor(OFF.penalties, device=device)[:, None].repeat(1, self._rows)
            in_prompt = torch.zeros(sizes, dtype=torch.bool, device=device)
            counts = torch.zeros(sizes, dtype=torch.int32, device=device)
            self._penalties = _Penalties(settings, in_prompt, counts)
        if used.biases and self._biases is None:
            self._biases = torch.zeros(sizes, device=device)
        if used.masks and self._masks is None:
            words = -(-self._vocab_size // 32)
            self._masks = torch.full((self._rows, words), -1, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        penalties = self._penalties
        parts = [] if penalties is None else [penalties.settings, penalties.in_prompt, penalties.counts]
        return parts + [part for part in (self._biases, self._masks) if part is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    def begin(
        self, begun: Sequence[tuple[int, RowSequence]], prompt_of: Callable[[RowSequence], Sequence[int]]
    ) -> None:
        """Initialize the state of rows that have been assigned to sequences.

        `prompt_of` returns a sequence's prompt.
        """
        self.allocate(UsedParts.by(sequence for _, sequence in begun))
        if self._penalties is None and self._biases is None:
            return
        rows = to_device(torch.tensor([row for row, _ in begun]), self._device)
        if self._penalties is not None:
            state = self._penalties
            settings = torch.tensor([sequence.processing.penalties for _, sequence in begun])
            state.settings[:, rows] = to_device(settings.T.contiguous(), self._device)
            state.in_prompt.index_fill_(0, rows, False)
            state.counts.index_fill_(0, rows, 0)
            penalized = [(row, one) for row, one in begun if one.processing.has_penalties]
            if prompt := self._local((row, token) for row, one in penalized for token in prompt_of(one)):
                state.in_prompt.index_put_(self._index(prompt), state.in_prompt.new_ones(()))
            if sampled := self._local((row, token) for row, one in penalized for token in one.ids):
                state.counts.index_put_(self._index(sampled), state.counts.new_ones(()), accumulate=True)
        if self._biases is not None:
            self._biases.index_fill_(0, rows, 0.0)
            biases = {(row, token): x for row, one in begun for token, x in one.processing.biases.items()}
            if biased := self._local(biases):
                values = torch.tensor([biases[row, entry + self._first] for row, entry in biased])
                self._biases.index_put_(self._index(biased), to_device(values, self._device))

    def _local(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (row, local entry) of those (row, token) pairs whose vocabulary entry is on this rank."""
        return [
            (row, token - self._first) for row, token in pairs if 0 <= token - self._first < self._entries
        ]

    def _index(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows, entries = to_device(torch.tensor(pairs).T.contiguous(), self._device)
        return rows, entries

    def move(self, source: int, target: int) -> None:
        """Copy a row's state to another row."""
        for part in self.tensors:
            rows = part.mT if self._penalties is not None and part is self._penalties.settings else part
            rows[target] = rows[source]

    def set_masks(self, masks: np.ndarray) -> None:
        """Set the masks of all rows for the next step, int32 [rows, words]."""
        self._masks[: len(masks)] = to_device(torch.from_numpy(masks), self._device)

    def process(self, logits: Tensor, used: UsedParts) -> Tensor:
        """Process the logits [rows, local entries] of the rows 0 to rows - 1. Returns them in float32."""
        (rows, entries), logits = logits.shape, logits.float()
        if used.biases:
            logits = logits + self._biases[:rows, :entries]
        if used.penalties:
            state = self._penalties
            seen = state.in_prompt[:rows, :entries], state.counts[:rows, :entries]
            logits = penalize(logits, *seen, *state.settings[:, :rows])
        if used.masks:
            allowed = allowed_entries(self._masks[:rows], self._first, entries)
            logits = logits.masked_fill(~allowed, -torch.inf)
        return logits

    def process_drafted(self, logits: Tensor, drafts: Tensor | None, used: UsedParts) -> Tensor:
        """Process the logits after the newest token and after each draft. A draft counts like a sampled token.

        Masks apply only to a row's first logits, those after the newest token.

        Args:
            logits: [rows * tokens, local entries], of the rows' newest tokens and drafts.
            drafts: int64 [rows, tokens - 1], -1 for no draft. None means no row has drafts.
            used: features to apply.
        """
        if drafts is None:
            return self.process(logits, used)
        rows, width = len(drafts), drafts.shape[1] + 1
        by_token, results = logits.unflatten(0, (rows, width)).unbind(1), []
        for ahead, after in enumerate(by_token):
            results.append(self.process(after, used if ahead == 0 else used._replace(masks=False)))
            if ahead < width - 1:
                self.count(drafts[:, ahead : ahead + 1], drafts[:, ahead : ahead + 1] >= 0, used)
        self.count(drafts, drafts >= 0, used, -1)
        return torch.stack(results, 1).flatten(0, 1)

    def count(self, ids: Tensor, is_counted: Tensor, used: UsedParts, times: int = 1) -> None:
        """Add `times` to the counts of those ids, int64 [rows, tokens], for which `is_counted`, bool [rows, tokens], is
        True.
        """
        if used.penalties:
            entries = ids - self._first
            is_counted = is_counted & (entries >= 0) & (entries < self._entries)
            counts = self._penalties.counts[: len(ids)]
            counts.scatter_add_(1, entries.clamp(0, self._entries - 1), times * is_counted.int())


def token_masks(sequences: Sequence[RowSequence | None], vocab_size: int) -> np.ndarray:
    """Return a bit mask of the allowed next tokens per row, int32 [rows, ceil(vocab_size / 32)].

    A set bit allows the token.
    """
    words = np.full((len(sequences), -(-vocab_size // 32)), -1, dtype=np.int32)
    for row, sequence in enumerate(sequences):
        for mask in () if sequence is None else sequence.masks:
            mask.restrict(words[row])
    return words
