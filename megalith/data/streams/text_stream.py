"""A text stream as a dataset of a run. Worker processes or the calling process read its lanes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalith.data.streams.lane import Lane, LanePosition, StreamSettings
from megalith.data.streams.lane_worker import LaneSample, LaneWorker, next_of
from megalith.data.streams.stream import STREAM_LENGTH, SampleStream, State
from megalith.errors import DataError, MegalithError, shorten
from megalith.tables import counted

AHEAD = 64  # samples that a worker makes ahead, over its lanes
MAX_LANES = 64  # by default


def default_lanes(global_batch_size: int, shards: int) -> int:
    """Return the number of lanes: the largest divisor of the global batch size up to the number of shards and 64."""
    most = min(shards, MAX_LANES, global_batch_size)
    return next(lanes for lanes in range(most, 0, -1) if global_batch_size % lanes == 0)


class TextStream(SampleStream):
    """Samples of a stream of text, at ascending positions.

    Args:
        settings: settings of the stream.
        num_workers: number of worker processes; 0: the calling thread reads and tokenizes.
    """

    def __init__(self, settings: StreamSettings, num_workers: int):
        self.settings, self._num_workers = settings, num_workers
        self._lock = threading.Lock()
        self._workers: list[LaneWorker] = []
        self._saved: State | None = None
        self._touched: list[str] = []  # shards with another modification time than at the checkpoint
        self._identity = [shard.identity() for shard in settings.shards]
        self.restart()

    @property
    def name(self) -> str:
        return self.settings.entry

    def __len__(self) -> int:
        return STREAM_LENGTH

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.name}"

    def epochs(self) -> dict[str, int]:
        return {}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return True

    def restart(self, position: int = 0, stride: int = 1, kept_states: int = 1) -> None:
        """See SampleStream. Raise DataError if the saved state belongs to other shards or lanes."""
        self.close()
        with self._lock:
            lanes = self.settings.lanes
            self._starts = [LanePosition()] * lanes
            if self._saved is not None:
                self._check_saved()
                starts = [LanePosition(*fields) for fields in self._saved["lanes"]]
                if all(start.samples <= self._next_sample(n, position) for n, start in enumerate(starts)):
                    self._starts = starts
            kept = 2 + stride * kept_states // lanes
            self._positions = [deque([start], kept) for start in self._starts]  # per lane, the last ones
            self._readers: dict[int, Lane | LaneWorker] = {}
            self._errors: dict[int, MegalithError] = {}  # of lanes that have no further sample
            self._skipped = [start.skipped for start in self._starts]
            self.bad_lines: list[str] = []

    def __getitem__(self, i: int) -> np.ndarray:
        number, lane = divmod(i, self.settings.lanes)
        with self._lock:
            if number < self._positions[lane][-1].samples:
                raise IndexError(
                    f"sample {i} cannot be read, because the stream is already past "
                    "it; read a stream in order"
                )
            while True:
                sample = self._next(lane)
                self._positions[lane].append(sample.position)
                self._skipped[lane] = sample.skipped
                self.bad_lines += sample.bad_lines
                if sample.position.samples > number:
                    return sample.tokens.astype(np.int64)

    def state_at(self, position: int) -> State | None:
        """See SampleStream. A lane that this rank does not read keeps the position that it had at the last
        `restart`.
        """
        with self._lock:
            lanes = []
            for lane, positions in enumerate(self._positions):
                wanted = self._next_sample(lane, position)
                before = [each for each in positions if each.samples <= wanted]
                lanes.append((max(before, key=lambda each: each.samples, default=LanePosition())).to_list())
        return {"entry": self.name, "shards": self._identity, "lanes": lanes}

    def merged_state(self, position: int, states: Sequence[State | None]) -> State | None:
        """See SampleStream. The merged position of a lane is the latest position that any rank has for it."""
        lanes = [
            max(each) for each in zip(*(state["lanes"] for state in states))
        ]  # lists begin with `samples`
        return {**states[0], "lanes": lanes}

    def load_state(self, state: State | None) -> None:
        self._saved = state

    def notes(self, state: State | None) -> list[str]:
        positions = [LanePosition(*fields) for fields in state["lanes"]]
        documents, empty, skipped = (
            sum(getattr(each, name) for each in positions) for name in ("documents", "empty", "skipped")
        )
        notes = []
        if self._touched:
            notes.append(
                f"{self.name}: the modification time of {counted(len(self._touched), 'file')} differs from that at "
                f"the checkpoint of this run, so samples may differ if their text changed: {shorten(self._touched)}"
            )
        if not empty and not skipped and not self.bad_lines:
            return notes
        note = f"{self.name}: {counted(documents, 'document')} read"
        note += f", {empty:,} of them without tokens" * bool(empty)
        note += f", {skipped:,} unusable ones skipped (data.skip_bad_documents)" * bool(skipped)
        note += f"; for example: {self.bad_lines[0]}" if self.bad_lines else ""
        return [*notes, note]

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.close()
            self._workers, self._readers = [], {}

    def _next_sample(self, lane: int, position: int) -> int:
        """Return the index of a lane's first sample at or after a position of the stream."""
        return max(0, -(-(position - lane) // self.settings.lanes))

    def _next(self, lane: int) -> LaneSample:
        if lane in self._errors:  # another thread of the loader has met it
            raise self._errors[lane]
        try:
            reader = self._readers.get(lane)
            if reader is None:
                reader = self._readers[lane] = self._open(lane)
            return reader.next(lane) if isinstance(reader, LaneWorker) else next_of(reader)
        except MegalithError as error:
            self._errors[lane] = error
            raise

    def _open(self, lane: int) -> Lane | LaneWorker:
        position = self._positions[lane][-1]
        if not self._num_workers:
            return Lane(self.settings, lane, position)
        if len(self._workers) < min(self._num_workers, self.settings.lanes):
            ahead = max(4, AHEAD * self._num_workers // self.settings.lanes)
            self._workers.append(LaneWorker(self.settings, ahead))
        worker = self._workers[len(self._readers) % len(self._workers)]
        worker.open(lane, position)
        return worker

    def _check_saved(self) -> None:
        saved, shards = self._saved, self._identity
        way_out = "restore it, or start a new run with model.init_from set to the checkpoint"
        if saved["entry"] != self.name:
            raise DataError(
                f"the checkpoint is at a position in {saved['entry']}, but the run reads {self.name} in its place; "
                "name the same data in the same order, or start a new run with model.init_from set to the checkpoint"
            )
        if len(saved["lanes"]) != self.settings.lanes:
            raise DataError(
                f"the checkpoint is at a position in {self.name} with {len(saved['lanes'])} lanes, but the run "
                f"reads it with {self.settings.lanes}; set data.stream_lanes to {len(saved['lanes'])}, or "
                "start a new run with model.init_from set to the checkpoint"
            )
        self._touched = []
        for was, now in zip(saved["shards"], shards):
            if _differ(was, now):
                raise DataError(
                    f"{self.name} has changed since the checkpoint: {_described(was)} is {_described(now)} now; "
                    + way_out
                )
            if was[2:] and was[2] is not None and was[2] != now[2]:
                self._touched.append(now[0])
        if len(saved["shards"]) != len(shards):
            raise DataError(
                f"{self.name} has {len(shards):,} shards, and {len(saved['shards']):,} at the checkpoint; {way_out}"
            )


def _differ(was: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if two identities of a shard have another name, size or version in a store.

    Checkpoints written by earlier commits do not have the sizes of objects and saved datasets.
    """
    name, size, stamp = [*was, None][:3]
    other_version = isinstance(stamp, str) and stamp != now[2]
    return name != now[0] or (size is not None and size != now[1]) or other_version


def _described(shard: Sequence[Any]) -> str:
    name, size, stamp = [*shard, None][:3]
    version = f", version {stamp}" if isinstance(stamp, str) else ""
    return str(name) if size is None else f"{name} ({size:,} bytes{version})"
