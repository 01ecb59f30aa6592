"""Inspection of a run's data from its configuration: the samples of a step, and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megalith.checkpoint import open_checkpoint
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.blend import BlendedDataset, indexed_datasets
from megalith.data.chat.chat_dataset import ChatDataset
from megalith.data.dataset import SPLITS, GPTDataset, SampleDataset
from megalith.data.indexed import IndexedDataset
from megalith.data.length_statistics import cut_fraction, length_statistics
from megalith.data.masked_lm import SentenceSamples
from megalith.data.own_dataset import StreamDataset
from megalith.data.packed_dataset import PackedDataset
from megalith.data.source_plan import source_plan
from megalith.data.text_data import source_name
from megalith.errors import ConfigError
from megalith.remote import open_location
from megalith.training.build import Data, prepare


class RunData:
    """A run's data as one process reads it, without processes, model or device.

    `step` is the number of finished steps: 0, or those of the newest checkpoint in the output folder.
    """

    def __init__(self, config: RunConfig, from_checkpoint: bool = False):
        """Open the data.

        Args:
            config: the run's configuration, for `train` or `sft`.
            from_checkpoint: continue from the newest checkpoint in the output folder, if there is one.

        Raises:
            MegalithError: the error that the run would raise.
        """
        if config.rl.prompts_or_rollouts or config.dpo.enabled:
            raise ConfigError("the data of grpo and dpo cannot be shown; give a run file for train or sft")
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
            Per sample `position` in the stream, `index` in the dataset (not for streams), `source`, `tokens` (the
            inputs and the last label) and `learned`, the number of tokens in the loss.
        """
        train, order, samples = self.data.train, None, []
        count = self.sizes.micro_batches(self.consumed_samples)
        with self.data.train_loader(
            self.step, self.consumed_samples, torch.device("cpu"), self.left_out
        ) as batches:
            order = self.data.order
            for _ in range(count):
                batch = next(batches)
                for row in range(len(batch.input_ids)):
                    position = int(batch.sample_numbers[row])
                    index = order(position)
                    tokens = [*batch.input_ids[row].tolist(), int(batch.labels[row, -1])]
                    learned = int((batch.loss_mask[row] > 0).sum())
                    sample = {"position": position, "index": index, "source": train.describe(index)}
                    if isinstance(train, StreamDataset):
                        del sample["index"]
                    samples.append({**sample, "tokens": tokens, "learned": learned})
        return samples

    def advance_to(self, step: int) -> None:
        """Set the number of finished steps to `step`, from the start of the run."""
        if not 0 <= step < self.sizes.iterations(self.config.train):
            total = self.sizes.iterations(self.config.train)
            raise ConfigError(
                f"step {step + 1} is not one of the run's {total:,} steps; choose 1 to {total:,}"
            )
        self.step, self.consumed_samples = step, 0
        for _ in range(step):
            self.consumed_samples += self.sizes.size(self.consumed_samples)

    def plan(self) -> dict[str, Any]:
        """Return samples, tokens and epochs of each training source over the run, and `steps`."""
        if not isinstance(self.data.train, BlendedDataset | GPTDataset | PackedDataset | SentenceSamples):
            raise ConfigError(
                "data plan needs pre-training data in data.data_path or data.train_data_path; for other data use "
                "megalith data stats --config"
            )
        steps = self.sizes.iterations(self.config.train)
        samples = self.sizes.samples_for_iterations(steps)
        return {"steps": steps, **source_plan(self.data.train, samples, self.config.data.seq_length)}

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the data by split, and the samples and tokens of each source in the training samples."""
        splits = dict(zip(SPLITS, (self.data.train, self.data.valid, self.data.test)))
        train, steps = self.config.train, self.sizes.iterations(self.config.train)
        evaluated = train.eval_iters * self.sizes.global_batch_size
        samples = {"train": self.sizes.samples_for_iterations(steps), "valid": evaluated, "test": evaluated}
        return {
            name: _statistics(split, samples[name]) for name, split in splits.items() if split is not None
        }


def indexed_statistics(indexed: IndexedDataset, seq_length: int | None) -> dict[str, Any]:
    """Return statistics of the documents of an indexed dataset.

    Args:
        indexed: the dataset.
        seq_length: tokens per sample, for the fraction of documents that samples cut; None: omit it.
    """
    sums = np.concatenate([[0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)])
    lengths = np.diff(sums[indexed.document_indices])
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
            "lengths": length_statistics(dataset.samples.lengths),
        }
    sources = {}
    for part, share in _parts(dataset):
        [indexed] = list(indexed_datasets(part)) or [None]
        if indexed is None:
            continue
        seq_length = part.seq_length if isinstance(part, GPTDataset | PackedDataset) else None
        source = {"samples": round(share * samples), "epochs": part.epochs().get(indexed.prefix, 1)}
        if seq_length is not None:
            source["tokens"] = source["samples"] * seq_length
        statistics = indexed_statistics(indexed, seq_length)
        if isinstance(part, PackedDataset):
            statistics["cut_documents"] = part.cut_documents / part.num_documents
            statistics["longer_documents"] = part.cut_documents
            statistics["rows"], statistics["packing"] = part.samples_per_epoch, part.fill
        sources[source_name(indexed.prefix)] = {**source, **statistics}
    return {"samples": samples, "sources": sources}


def _parts(dataset: SampleDataset) -> Iterator[tuple[SampleDataset, float]]:
    """Yield each dataset of a blend with its share of the samples."""
    if not isinstance(dataset, BlendedDataset):
        yield dataset, 1.0
        return
    for part, count in zip(dataset.datasets, dataset.sample_counts()):
        yield part, count / len(dataset)
