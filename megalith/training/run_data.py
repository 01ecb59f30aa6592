"""Inspects a run's data from its configuration: the samples of a step, and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megalith.checkpoint import open_checkpoint
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import Batch
from megalith.data.blend import indexed_datasets
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.chat.chat_dataset import ChatDataset
from megalith.data.dataset import SPLITS, GPTDataset, SampleDataset
from megalith.data.length_statistics import cut_fraction, length_statistics
from megalith.data.loader import Loader
from megalith.data.own_dataset import MapDataset, StreamDataset
from megalith.data.packed_dataset import PackedDataset
from megalith.data.source_plan import source_plan
from megalith.data.streams.stream import SampleStream
from megalith.data.streams.stream_statistics import estimated_epochs, stream_statistics
from megalith.data.streams.text_stream import TextStream
from megalith.data.text_data import source_name
from megalith.errors import ConfigError, DataError
from megalith.remote import open_location
from megalith.training.build import prepare
from megalith.training.run_datasets import Data

STATIC_CONTEXT = {
    "dynamic_context_parallel": False,
    "max_seqlen_per_dp_cp_rank": None,
    "min_dynamic_context_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,  # an interleaved schedule may not take the static micro-batches
    "microbatch_group_size_per_virtual_pipeline_stage": None,
    "pipeline_schedule": "1f1b",
}


class RunData:
    """A run's data, opened in one process without a process group, model or device.

    `step` is the number of finished steps: 0, or the step of the newest checkpoint in the output folder.
    """

    def __init__(self, config: RunConfig, from_checkpoint: bool = False):
        """Open the data.

        Args:
            config: the run's configuration, for `train` or `sft`.
            from_checkpoint: continue from the newest checkpoint in the output folder, if there is one.

        Raises:
            MegalithError: the error that the run would raise.
        """
        if config.rl.prompts_or_rollouts or (config.chat is not None and not config.sft.enabled):
            raise ConfigError(
                "the data of grpo, dpo, kto and reward cannot be shown; pass a run file for train or sft"
            )
        if (
            config.parallel.dynamic_context_parallel
        ):  # needs the run's ranks, and leaves the samples as they are
            config = config.with_settings(
                {f"parallel.{name}": value for name, value in STATIC_CONTEXT.items()}
            )
        parallel = config.parallel
        size = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
        ranks = max(size, experts) * parallel.pipeline_model_parallel_size
        self.config, self.tokenizer, self.notes = prepare(config, ranks)
        self.sizes = BatchSizeSchedule.from_config(self.config.train, data_parallel_size=1)
        total = self.sizes.iterations(self.config.train)
        self.data = Data(self.config, self.sizes, total, self.tokenizer, Axis(), show_progress=True)
        self.step, self.consumed_samples, self.left_out = 0, 0, []
        if from_checkpoint and open_location(self.config.run_folder).exists():
            checkpoint = open_checkpoint(self.config.run_folder, ())
            if checkpoint is not None:
                record = checkpoint.manifest
                self.step, self.consumed_samples = record.step, record.consumed_samples
                self.left_out = record.left_out
                self.data.load_state(checkpoint.task_files)

    def samples_of_next_step(self) -> list[dict[str, object]]:
        """Return the samples of the step after `step`, in the order of the stream.

        Returns:
            A dict per sample: `position` in the stream, `index` in the dataset (not for streams), `source`, `tokens`
            (the inputs and the last label) and `learned`, the number of tokens in the loss.

        Raises:
            ConfigError: the run has finished.
        """
        if self.step >= (total := self.sizes.iterations(self.config.train)):
            raise ConfigError(
                f"the run has finished its {total:,} steps and reads no more; choose a step from 1 to {total:,} "
                "(--step) or positions (--position), or raise train.train_iters"
            )
        samples = []
        with self._loader(self.step, self.consumed_samples) as batches:
            for _ in range(self.sizes.micro_batches(self.consumed_samples)):
                batch = next(batches)
                samples += [self._sample(batch, row) for row in range(len(batch.input_ids))]
        return samples

    def samples_at(self, positions: Sequence[int]) -> list[dict[str, object]]:
        """Return the samples at these positions of the run's stream, in the format of `samples_of_next_step`. Positions
        count consumed samples. Raises DataError for a negative one.
        """
        if negative := [position for position in positions if position < 0]:
            raise DataError(f"position {negative[0]} is before the first one; positions must be at least 0")
        samples = []
        for position in positions:
            with self._loader(0, position) as batches:
                samples.append(self._sample(next(batches), 0))
        return samples

    def _loader(self, step: int, consumed_samples: int) -> Loader:
        return self.data.train_loader(step, consumed_samples, torch.device("cpu"), self.left_out)

    def _sample(self, batch: Batch, row: int) -> dict[str, object]:
        position, train = int(batch.sample_numbers[row]), self.data.train
        index = self.data.order(position)
        sample: dict[str, object] = {"position": position}
        if not isinstance(train, SampleStream):
            sample["index"] = index
        sample["source"] = train.describe(index)
        sample["tokens"] = [*batch.input_ids[row].tolist(), int(batch.labels[row, -1])]
        sample["learned"] = int((batch.loss_mask[row] > 0).sum())
        return sample

    def advance_to(self, step: int) -> None:
        """Set the number of finished steps to `step`, from the start of the run. Raises ConfigError after the last."""
        if not 0 <= step < self.sizes.iterations(self.config.train):
            total = self.sizes.iterations(self.config.train)
            raise ConfigError(
                f"step {step + 1} is not one of the run's {total:,} steps; choose 1 to {total:,}"
            )
        self.step, self.consumed_samples = step, 0
        for _ in range(step):
            self.consumed_samples += self.sizes.size(self.consumed_samples)

    def plan(self) -> dict[str, Any]:
        """Return the samples, tokens and epochs of each training source over the run, and the number of `steps`."""
        if self.config.data.mock or isinstance(self.data.train, ChatDataset):
            raise ConfigError(
                "data plan needs pre-training data in data.data_path, data.train_data_path or data.dataset; for "
                "conversations use megalith data stats --config"
            )
        steps = self.sizes.iterations(self.config.train)
        samples = self.sizes.samples_for_iterations(steps)
        plan = {"steps": steps, **source_plan(self.data.train, samples, self.config.data.seq_length)}
        for (part, _), source in zip(_parts(self.data.train), plan["sources"], strict=True):
            if isinstance(part, TextStream):
                source["epochs"] = estimated_epochs(stream_statistics(part.settings), source["tokens"])
                source["estimated"] = True
        return plan

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the data by split, and the samples and tokens of each source in the training samples."""
        splits = dict(zip(SPLITS, (self.data.train, self.data.valid, self.data.test)))
        train, steps = self.config.train, self.sizes.iterations(self.config.train)
        evaluated = train.eval_iters * self.sizes.global_batch_size
        samples = {"train": self.sizes.samples_for_iterations(steps), "valid": evaluated, "test": evaluated}
        return {
            name: _statistics(split, samples[name]) for name, split in splits.items() if split is not None
        }


def document_statistics(lengths: np.ndarray, seq_length: int | None) -> dict[str, Any]:
    """Return the number of documents and their lengths. With `seq_length`, also return the fraction that samples cut.

    Args:
        lengths: tokens per document, int [documents].
        seq_length: tokens per sample, for the fraction of documents that samples cut; None means omit it.
    """
    statistics = {"documents": length_statistics(lengths)}
    if seq_length is not None:
        statistics["cut_documents"] = cut_fraction(lengths, seq_length)
        statistics["longer_documents"] = int((lengths > seq_length).sum())
    return statistics


def _statistics(dataset: SampleDataset, samples: int) -> dict[str, Any]:
    if isinstance(dataset, ChatDataset):
        rows = dataset.num_rows
        answers = dataset.samples.sequences_per_sample
        return {
            "samples": dataset.num_samples,
            "rows": rows,
            "packing": dataset.num_tokens / (rows * answers * dataset.seq_length),
            "events": dict(dataset.samples.counts),
            "lengths": length_statistics(dataset.sequence_lengths),
        }
    sources = {}
    for part, share in _parts(dataset):
        if isinstance(part, TextStream):
            source = {"samples": round(share * samples)}
            source["tokens"] = source["samples"] * part.settings.seq_length
            about = stream_statistics(part.settings)
            source["epochs"] = estimated_epochs(about, source["tokens"])
            sources[part.name] = {**source, "stream": True, **about}
            continue
        if isinstance(part, MapDataset | StreamDataset):
            size = getattr(part, "samples_per_epoch", None)
            source = {"samples": samples, "epochs": None if size is None else samples / size}
            sources[part.source] = {**source, "tokens": samples * part.seq_length, "dataset_samples": size}
            continue
        [indexed] = list(indexed_datasets(part)) or [None]
        if indexed is None:
            continue
        seq_length = part.seq_length if isinstance(part, GPTDataset | PackedDataset) else None
        source = {"samples": round(share * samples)}
        source["epochs"] = source["samples"] / part.samples_per_epoch
        if seq_length is not None:
            source["tokens"] = source["samples"] * seq_length
        statistics = document_statistics(part.document_lengths, seq_length)
        if isinstance(part, PackedDataset):
            statistics["cut_documents"] = part.cut_documents / part.num_documents
            statistics["longer_documents"] = part.cut_documents
            statistics["rows"], statistics["packing"] = part.samples_per_epoch, part.fill
        sources[source_name(indexed.prefix)] = {**source, **statistics}
    return {"samples": samples, "sources": sources}


def _parts(dataset: SampleDataset) -> Iterator[tuple[SampleDataset, float]]:
    """Yield each dataset of a blend, with the fraction of the samples that come from it."""
    if not isinstance(dataset, BlendedDataset):
        yield dataset, 1.0
        return
    counts = dataset.sample_counts()
    for part, count in zip(dataset.datasets, counts, strict=True):
        yield part, count / sum(counts)
