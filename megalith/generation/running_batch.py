"""Continuous batching: manages sequences that wait for a row, sequences in rows, and windows of steps in flight.

     add ─▶ waiting ─▶ a row: prefill, then windows of steps ─▶ ended, cancelled, or paused (LongRoPE) ─▶ waiting

The host launches a window and meanwhile reads the samples of the previous one. A row whose sequence has ended is
reassigned once the host has read the end. Every rank of a tensor-parallel axis makes the same calls in the same order.

While a sequence has masks (logits_processing.py), a window is one step, and the host reads it before the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megalith.generation.logits_state import UsedParts, token_masks
from megalith.generation.requests import RowSequence, Sampling

if TYPE_CHECKING:
    from megalith.generation.engine import Engine

KvCache = Literal["keep", "recompute"]
"""Treatment of keys and values in progress when the weights change."""


@dataclass
class _Window:
    """A window of launched steps: their samples, and the sequences in their rows."""

    owners: list[RowSequence | None]
    ids: Tensor  # int64 [tokens, rows] on the host, -1 where a row got none
    logprobs: Tensor  # float32 [tokens, rows]
    routes: Tensor | None  # int16 [tokens, rows, layers with experts, topk], of the tokens before the samples
    copied: torch.cuda.Event | None
    version: int  # of the weights that sampled


class RunningBatch:
    """The sequences of an engine. An engine has one at a time."""

    def __init__(self, engine: Engine, sampling: Sampling):
        """Start without sequences. With `sampling.by_row`, each sequence has its own sampling settings."""
        self._engine, self._sampling = engine, sampling
        self._on_cpu = engine.device.type == "cpu"
        self._owners: list[RowSequence | None] = [None] * engine.max_rows
        self._waiting: deque[RowSequence] = deque()
        self._pending: deque[_Window] = deque()
        engine.reset_state(sampling)

    @property
    def is_busy(self) -> bool:
        """True if a sequence has not ended."""
        return bool(self._waiting or self._pending or any(self._owners))

    def add(self, sequences: Iterable[RowSequence]) -> None:
        """Queue sequences for the next free rows."""
        self._waiting.extend(sequences)

    def cancel(self, sequence: RowSequence) -> None:
        """End a sequence. Its row becomes free for the next step."""
        sequence.is_cancelled = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        for row, owner in enumerate(self._owners):
            if owner is sequence:
                self._owners[row] = None
                self._engine.clear_row(row)

    @torch.no_grad()
    def step(self, steps: int | None = None) -> list[tuple[RowSequence, list[int]]]:
        """Launch a window of steps if any row holds a sequence.

        Returns the new tokens of an earlier window, or of this one.

        Args:
            steps: number of steps, at most the engine's window. Default: the engine's window.
        """
        self._fill()
        if any(owner is not None and owner.masks for owner in self._owners):
            return self._masked_step()
        if any(self._owners):
            self._pending.append(self._launch(steps))
        if self._pending and (len(self._pending) > (not self._on_cpu) or not any(self._owners)):
            return self._read(self._pending.popleft())
        return []

    def _masked_step(self) -> list[tuple[RowSequence, list[int]]]:
        """Read all windows in flight, run one step with the masks that follow from their tokens, and return the new
        tokens.
        """
        added = self._read_all()
        if any(self._owners):
            added += self._read(self._launch(steps=1))
        return _merged(added)

    def _read_all(self) -> list[tuple[RowSequence, list[int]]]:
        return [each for _ in range(len(self._pending)) for each in self._read(self._pending.popleft())]

    @torch.no_grad()
    def update_weights(
        self, load: Callable[[], None], kv_cache: KvCache
    ) -> list[tuple[RowSequence, list[int]]]:
        """Replace the weights between two steps. The sequences in progress continue with the new weights.

        Args:
            load: loads the weights and sets the engine's version.
            kv_cache: recompute: compute the keys and values of all tokens again. keep: later tokens attend to keys and
                values of the earlier weights, which costs nothing.

        Returns:
            The new tokens of earlier windows, as `step` does.
        """
        added = self._read_all()
        load()
        begun = [(row, owner) for row, owner in enumerate(self._owners) if owner is not None]
        if begun and kv_cache == "recompute":
            self._engine.fill_rows(begun)
        return _merged(added)

    def _fill(self) -> None:
        """Assign waiting sequences to idle rows.

        On a CPU, a pass covers only the rows up to the last one in use. When no sequence is waiting, the last sequences
        are therefore moved into idle rows before them.
        """
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        begun = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        if begun:
            rows = self._engine.choose_rows(begun, free)
            for row, sequence in zip(rows, begun):
                self._owners[row] = sequence
            self._engine.fill_rows([*zip(rows, begun)])
        if self._on_cpu and not self._waiting:
            self._compact()

    def _compact(self) -> None:
        owners = self._owners
        used = sum(owner is not None for owner in owners)
        targets = [row for row in range(used) if owners[row] is None]
        sources = [row for row in range(used, len(owners)) if owners[row] is not None]
        for target, source in zip(targets, sources):
            owners[target], owners[source] = owners[source], None
            self._engine.move_row(source, target, owners[target].length)

    def _launch(self, steps: int | None = None) -> _Window:
        """Launch a window of steps and the copy of their samples to the host."""
        engine, owners, sampling = self._engine, self._owners, self._sampling
        rows, longest = engine.max_rows, engine.max_tokens
        if self._on_cpu:
            rows = max(row for row, owner in enumerate(owners) if owner is not None) + 1
            longest = max(owner.length for owner in owners if owner is not None)
        if sampling.by_row:
            has_filters = any(owner is not None and owner.sampling[1:] != (0, 1, 0) for owner in owners)
            sampling = replace(sampling, top_k=int(has_filters))
        used = UsedParts.by(owners)
        if used.masks:
            engine.set_masks(token_masks(owners, engine.vocabulary_entries))
        steps = engine.window if steps is None else steps
        launched = engine.run_window(sampling, rows, longest, steps, used)
        window = _Window(owners[:rows], *launched, engine.version)
        for row, sequence in enumerate(owners):
            if sequence is not None:
                sequence.launched += steps  # at least one token per step
                if sequence.launched >= sequence.pause_at:  # further samples are not used
                    owners[row] = None
        return window

    def _read(self, window: _Window) -> list[tuple[RowSequence, list[int]]]:
        """Append a window's tokens to their sequences and free the rows of finished ones. Returns the tokens."""
        if window.copied is not None:
            began = time.perf_counter()
            window.copied.synchronize()
            self._engine.wait_seconds += time.perf_counter() - began
        ids, logprobs = window.ids.T.tolist(), window.logprobs.T.tolist()
        added = []
        for row, sequence in enumerate(window.owners):
            if sequence is None or sequence.ended:
                continue
            new, its_logprobs, indices = ids[row], logprobs[row], range(len(ids[row]))
            if -1 in new:
                indices = [at for at, token in enumerate(new) if token >= 0]
                new, its_logprobs = ([values[at] for at in indices] for values in (new, its_logprobs))
            if not new:
                continue
            count = sequence.append(new, its_logprobs)
            sequence.versions += [window.version] * count
            if window.routes is not None:
                sequence.routes.append(window.routes[list(indices[:count]), row].numpy())
            added.append((sequence, new[:count]))
            if len(sequence.ids) >= sequence.pause_at or sequence.ended:
                if self._owners[row] is sequence:
                    self._owners[row] = None
                    if sequence.ended_on_host:
                        self._engine.clear_row(row)
                if not sequence.ended:
                    self._waiting.appendleft(sequence)
        return added


def _merged(added: list[tuple[RowSequence, list[int]]]) -> list[tuple[RowSequence, list[int]]]:
    """Merge the entries that belong to the same sequence."""
    merged: dict[int, tuple[RowSequence, list[int]]] = {}
    for sequence, ids in added:
        merged.setdefault(id(sequence), (sequence, []))[1].extend(ids)
    return list(merged.values())
