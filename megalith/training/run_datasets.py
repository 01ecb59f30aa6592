"""Datasets of a run, their micro-batch loaders, and the stream positions stored in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megalith.comm.collectives import Axis, gather_json
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.balance import BatchCosts, assign, in_order, slowest
from megalith.data.blend import indexed_datasets
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.chat.chat_dataset import ChatDataset, make_chat_batch
from megalith.data.dataset import SampleDataset
from megalith.data.dataset_kinds import load_dataset_kind
from megalith.data.loader import Collate, Loader
from megalith.data.order import SampleOrder, SingleOrder, sample_order, stream_position
from megalith.data.own_dataset import MapDataset, OwnCollate, StreamDataset
from megalith.data.source_plan import source_notes, source_plan
from megalith.data.streams.stream import SampleStream, State
from megalith.data.text_data import cached_name, content_identity
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.report.report import TokenCounts, flops_by_length
from megalith.small_files import read_small_file
from megalith.training.build import boundary_rules, open_chat, open_datasets
from megalith.training.context_schedules import ContextSchedules

STREAM_FILE = "data_stream.json"  # in checkpoints: the position of a stream
STEPS_IN_NOTE = 16


class Data:
    """Datasets of a run and their loaders."""

    make_chat_batch = staticmethod(make_chat_batch)
    """Collate function for chat data."""

    def __init__(
        self,
        config: RunConfig,
        batch_sizes: BatchSizeSchedule,
        total_steps: int,
        tokenizer: Tokenizer | None,
        dp: Axis,
        show_progress: bool = False,
        dp_cp: Axis | None = None,
    ):
        """Open the run's data.

        Ranks along `dp` read different micro-batches. Ranks that differ only along other axes read the same
        micro-batches. Under dynamic context parallelism, ranks along `dp_cp` read different rows.
        """
        self._config, self._dp = config, dp
        self._batch_sizes = batch_sizes
        self._total_steps = total_steps
        self._ahead = 2 * max(batch_sizes.all_micro_batches)  # micro-batches of two steps
        self._rules = boundary_rules(config, tokenizer)
        self._kind = load_dataset_kind(config.data, config.model, tokenizer, config.train.seed)
        evaluated = config.train.eval_iters * batch_sizes.global_batch_size
        samples = (batch_sizes.samples_for_iterations(total_steps), evaluated, evaluated)
        self._stream_state: State | None = None
        self._stream_notes: list[str] = []
        self.notes: list[str] = []
        if config.chat is not None:
            self.train, *others, self.notes = open_chat(config, tokenizer)
            self.valid, self.test = (
                split and split.pad_to_batches(batch_sizes.global_batch_size) for split in others
            )
        else:
            self.train, self.valid, self.test = open_datasets(
                config, samples, tokenizer, show_progress, self.notes
            )
        self._schedules: ContextSchedules | None = None
        if config.parallel.dynamic_context_parallel and dp_cp is not None and dp_cp.size > 1:
            self._schedules = ContextSchedules(config, dp_cp)
            self.notes.append(self._schedule_note())
        if config.data.balance_batches and dp.size > 1:
            self.notes.append(self._balance_note())
        blend = isinstance(self.train, BlendedDataset)
        if blend:
            self.notes += source_notes(source_plan(self.train, samples[0], config.data.seq_length))
        epochs = [f"{prefix} {count} times" for prefix, count in self.train.epochs().items() if count > 1]
        if epochs and not blend and config.data.dataloader_type == "single":
            self.notes.append(
                f"the run's {samples[0]:,} samples, read in order (data.dataloader_type single), cover documents more "
                f"than once: {', '.join(epochs)}"
            )

    def train_loader(
        self,
        step: int,
        consumed_samples: int,
        device: torch.device,
        left_out: Sequence[Sequence[int]] = (),
    ) -> Loader:
        """Return a loader of micro-batches from `consumed_samples` to the end of the run.

        The ranges `left_out` are skipped (see data/order.py).
        """

        def sizes() -> Iterable[int]:
            consumed = consumed_samples
            for _ in range(step, self._total_steps):
                size = self._batch_sizes.size(consumed)
                yield size
                consumed += size

        data, seed = self._config.data, self._config.train.seed
        if isinstance(self.train, SampleStream):
            self.order = partial(stream_position, skipped=left_out)
            block = self._config.train.micro_batch_size * self._dp.size
            kept = 2 + self._ahead + max(self._batch_sizes.all_micro_batches)
            self.train.restart(self.order(consumed_samples), block, kept)
        else:
            self.order = sample_order(data.dataloader_type, len(self.train), seed, left_out)
            if self._schedules is not None:
                self._schedules.forget()
        costs = self.costs if data.balance_batches and self._dp.size > 1 else None
        return self._loader(self.train, self.order, sizes(), device, consumed_samples, costs)

    def costs(self, positions: range) -> np.ndarray:
        """Return the FLOPs of the training samples at positions of the stream, by the planner's count."""
        length, flops = self._config.data.seq_length, flops_by_length(self._config)
        squares = self.train.attention_cost([self.order(position) for position in positions])
        return length * flops(0.0) + squares * (flops(1.0) - flops(0.0))

    def _balance_note(self) -> str:
        """Return a note on the load of the slowest rank in the first steps, with and without balancing."""
        micro, ranks = self._config.train.micro_batch_size, self._dp.size
        self.order = sample_order(self._config.data.dataloader_type, len(self.train), self._config.train.seed)
        first, before, after = 0, [], []
        for _ in range(min(self._total_steps, STEPS_IN_NOTE)):
            batch = range(first, first + self._batch_sizes.size(first))
            costs = self.costs(batch)
            before.append(slowest(costs, in_order(len(batch), micro, ranks)))
            after.append(slowest(costs, assign(costs, micro, ranks)))
            first = batch.stop
        return (
            f"data.balance_batches: in the first {len(after)} steps, the slowest of {ranks} "
            f"data-parallel ranks has {sum(after) / len(after):.3f} × the mean work ({sum(before) / len(before):.3f} "
            "× without balancing)"
        )

    def _schedule_note(self) -> str:
        """Return a note on the forward passes of the first steps under dynamic context parallelism."""
        self.order = sample_order(self._config.data.dataloader_type, len(self.train), self._config.train.seed)
        first, schedules = 0, []
        for _ in range(min(self._total_steps, STEPS_IN_NOTE)):
            batch = range(first, first + self._batch_sizes.size(first))
            schedules.append(self._schedules.of_batch(self.train, self.order, batch))
            first = batch.stop
        self._schedules.forget()
        return self._schedules.describe(schedules)

    def work(self, consumed_samples: int, batch_size: int) -> TokenCounts | None:
        """Return the token counts of the next `batch_size` samples of the latest train loader.

        None means all sequences are full.
        """
        if not isinstance(self.train, ChatDataset):
            return None
        rows = [self.order(consumed_samples + at) for at in range(batch_size)]
        return TokenCounts(*(int(each) for each in self.train.work[rows].sum(0)))

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per data-parallel rank in the step that begins after `consumed_samples`
        samples.

        The step is one of the latest train loader's.
        """
        if self._schedules is not None:
            batch = range(consumed_samples, consumed_samples + self._batch_sizes.size(consumed_samples))
            return len(self._schedules.of_batch(self.train, self.order, batch).passes)
        return self._batch_sizes.micro_batches(consumed_samples)

    def files(self) -> dict[str, dict[str, int | str]]:
        """Return a record of the content (`identity`) of each training dataset, by prefix."""
        if isinstance(self.train, ChatDataset):
            return {"chat data": self.train.identity()}
        return {
            cached_name(indexed.prefix): indexed.identity() | content_identity(indexed.prefix)
            for indexed in indexed_datasets(self.train)
        }

    def state_files(self, consumed_samples: int, left_out: Sequence[Sequence[int]]) -> dict[str, bytes]:
        """Return the state of a stream after `consumed_samples` as checkpoint files, contents by file name.

        Collective over all ranks; only the first rank's result is complete.
        """
        if not isinstance(self.train, SampleStream):
            return {}
        position = stream_position(consumed_samples, left_out)
        states = gather_json(self.train.state_at(position), self._dp)
        self._stream_state = self.train.merged_state(position, states)
        return {} if self._stream_state is None else {STREAM_FILE: json.dumps(self._stream_state).encode()}

    def stream_notes(self) -> list[str]:
        """Return notes on documents that the train stream has skipped, once they are known: those before the last call
        of `state_files`.
        """
        notes = [] if self._stream_state is None else self.train.notes(self._stream_state)
        before, self._stream_notes = self._stream_notes, notes
        return [note for note in notes if note not in before]

    def load_state(self, files: Mapping[str, Path]) -> None:
        """Restore the state of a stream that `state_files` returned when the checkpoint was saved."""
        if isinstance(self.train, SampleStream):
            path = files.get(STREAM_FILE)
            self.train.load_state(None if path is None else json.loads(read_small_file(path, path.parent)))

    def preserves_order(self, num_samples: int) -> bool:
        """Return True if a run of `num_samples` samples uses the same samples in the same order, up to the shorter
        length.
        """
        return self.train.preserves_order(num_samples, permuted=self._config.data.dataloader_type == "cyclic")

    def evaluation_micro_batches(self, dataset: SampleDataset, number: int) -> int:
        """Return the number of micro-batches per data-parallel rank in global batch `number` of an evaluation."""
        size = self._batch_sizes.global_batch_size
        if self._schedules is not None:
            batch = range(number * size, (number + 1) * size)
            order = SingleOrder(len(dataset), wrap=True)
            return len(self._schedules.of_batch(dataset, order, batch).passes)
        return size // (self._config.train.micro_batch_size * self._dp.size)

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Return a loader of the first eval_iters global batches of `dataset`, the same in every evaluation."""
        sizes = [self._batch_sizes.global_batch_size] * self._config.train.eval_iters
        if isinstance(dataset, SampleStream):
            dataset = dataset.restarted()
        return self._loader(dataset, SingleOrder(len(dataset), wrap=True), sizes, device)

    def _loader(
        self,
        dataset: SampleDataset,
        order: SampleOrder,
        batch_sizes: Iterable[int],
        device: torch.device,
        consumed_samples: int = 0,
        costs: BatchCosts | None = None,
    ) -> Loader:
        threads = self._config.data.num_workers
        if isinstance(dataset, SampleStream):
            threads = min(threads, 1)  # a stream is read in order
        return Loader(
            dataset,
            order,
            micro_batch_size=self._config.train.micro_batch_size,
            batch_sizes=batch_sizes,
            vocab_size=self._config.model.vocab_size,
            data_parallel_rank=self._dp.rank,
            data_parallel_size=self._dp.size,
            consumed_samples=consumed_samples,
            num_workers=threads,
            ahead=self._ahead,
            pin_memory=device.type == "cuda",
            rules=self._rules,
            collate=self._collate(dataset),
            costs=costs,
            interleaved=self._config.train.batch_invariant,
            passes=self._schedules and partial(self._schedules.rows_of_rank, dataset, order),
        )

    def _collate(self, dataset: SampleDataset) -> Collate | None:
        if isinstance(dataset, ChatDataset):
            return self.make_chat_batch
        if isinstance(dataset, MapDataset | StreamDataset):
            return OwnCollate(dataset) if dataset.collates else None
        return self._kind.collate
