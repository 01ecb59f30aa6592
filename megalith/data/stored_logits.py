"""A teacher's predictions on disk: of every sample of a run's stream the likeliest entries of the vocabulary.

    FOLDER/logits.json                       what was asked, of whom
    FOLDER/samples_000000000000.safetensors  of the samples from that number on:
        indices   int32 [samples, seq, k]        the k likeliest entries after each token
        logprobs  float32 [samples, seq, k + 1]  their log-probabilities, the largest first, and that of all others
        digests   int64 [samples]                of the samples' own tokens

A file is there whole or not at all, and they are written in the samples' order: what is there is where to go on. A
sample is looked up by its number, so the layout that wrote it does not matter; the digest tells whether it is the one
that the teacher was asked about.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megalith.data.batch import Batch
from megalith.errors import DataError
from megalith.io import atomic_file, data_errors, make_folder
from megalith.small_files import read_small_file

RECORD, NAME = "logits.json", re.compile(r"samples_(\d{12})\.safetensors")


class LogitsRecord(BaseModel):
    """What a folder of predictions holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["megalith-teacher-logits"] = "megalith-teacher-logits"
    version: Literal[1] = 1
    teacher: str
    vocab_size: PositiveInt
    seq_length: PositiveInt
    top_k: PositiveInt
    temperature: PositiveFloat


class StoredLogits:
    """The predictions of a folder, and the next ones into it."""

    def __init__(self, folder: str | Path):
        """Raises DataError where it is not such a folder, or a file of it is missing or damaged."""
        self.folder = Path(folder)
        self.record = _read_record(self.folder / RECORD)
        found = [match for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name))]
        self._firsts = sorted(int(match[1]) for match in found)
        self.samples = 0
        """How many there are, from the first of the stream on."""
        for first in self._firsts:
            if first != self.samples:
                raise DataError(
                    f"{self.folder} has no predictions of the samples from {self.samples:,} to {first:,}, which "
                    f"{_name(self.samples)} had; delete the files from {_name(first)} on, and write them again"
                )
            self.samples += len(_opened(self.folder / _name(first)).get_slice("digests")[:])

    @classmethod
    def create(cls, folder: str | Path, record: LogitsRecord) -> StoredLogits:
        """A new folder, or one in which this was begun. Raises DataError for one with other predictions."""
        path = Path(folder) / RECORD
        if not path.exists():
            with data_errors(path):
                make_folder(path.parent)
            with atomic_file(path) as file:
                file.write(json.dumps(record.model_dump(), indent=1).encode())
        found = cls(folder)
        if found.record != record:
            names = [name for name, value in record if getattr(found.record, name) != value]
            differ = ", ".join(
                f"{each} {getattr(found.record, each)}, not {getattr(record, each)}" for each in names
            )
            raise DataError(f"{folder} was begun with {differ}; choose another folder, or delete this one")
        return found

    def append(self, indices: Tensor, logprobs: Tensor, digests: Tensor) -> None:
        """Writes those of the next samples: [samples, seq, k], [samples, seq, k + 1], [samples], of any device."""
        tensors = {"indices": indices.int(), "logprobs": logprobs.float(), "digests": digests}
        with atomic_file(self.folder / _name(self.samples)) as file:
            file.write(save({name: each.cpu().contiguous() for name, each in tensors.items()}))
        self._firsts.append(self.samples)
        self.samples += len(digests)

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of a batch's samples int32 [batch, seq, k] and float32 [batch, seq, k + 1]. Raises DataError for a sample
        that is not there, or is another than the teacher was asked about."""
        numbers = batch.sample_numbers.tolist()
        rows = [self._row(number) for number in numbers]
        indices, logprobs, digests = (torch.stack(each) for each in zip(*rows))
        for number, stored, own in zip(numbers, digests.tolist(), digests_of(batch).tolist()):
            if stored != own:
                raise DataError(
                    f"sample {number:,} of this run is not the one that {self.folder} has predictions of: the data, "
                    "their order or the tokenizer have changed; write them anew, by the settings of this run"
                )
        return indices, logprobs

    def _row(self, number: int) -> list[Tensor]:
        if number >= self.samples:
            raise DataError(
                f"{self.folder} has predictions of {self.samples:,} samples, and the run has come to sample "
                f"{number:,}; go on with `megalith teacher-logits`, for as many steps as this run"
            )
        first = self._firsts[bisect_right(self._firsts, number) - 1]
        path, record = self.folder / _name(first), self.record
        file, row = _opened(path), number - first
        found = [file.get_slice(name)[row : row + 1][0] for name in ("indices", "logprobs", "digests")]
        seq, k = record.seq_length, record.top_k
        if (found[0].shape, found[1].shape) != ((seq, k), (seq, k + 1)):
            raise DataError(
                f"{path} has predictions {[*found[0].shape]} a sample, where {RECORD} says {[seq, k]}; "
                "write them anew"
            )
        if found[0].min() < 0 or found[0].max() >= record.vocab_size or not found[1].isfinite().all():
            raise DataError(f"{path} has predictions that no teacher makes, in row {row}; write them anew")
        return found


def digests_of(batch: Batch) -> Tensor:
    """A number for each sample's tokens, their labels and positions: int64 [batch]."""
    rows = torch.stack([batch.input_ids, batch.labels, batch.position_ids], 1).cpu().numpy()
    return torch.tensor([zlib.crc32(row.tobytes()) for row in rows])


def _name(first: int) -> str:
    return f"samples_{first:012d}.safetensors"


def _read_record(path: Path) -> LogitsRecord:
    try:
        return LogitsRecord.model_validate_json(read_small_file(path, path.parent))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not say what they are"
        raise DataError(
            f"{path.parent} is no folder of a teacher's predictions ({RECORD}: {reason}); write one with "
            "`megalith teacher-logits`"
        ) from error


@lru_cache(maxsize=16)
def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); delete it and those after it, and go on writing"
        ) from error
