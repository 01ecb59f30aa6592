"""A teacher's stored predictions: the top-k vocabulary entries for every sample of a run's stream.

    FOLDER/logits.json                       teacher and settings
    FOLDER/samples_000000000000.safetensors  samples, starting at this number:
        indices   int32 [samples, seq, k]        top-k entries after each token
        logprobs  float32 [samples, seq, k + 1]  their log-probabilities, descending, then that of all other entries
        digests   int64 [samples]                checksums of the samples' tokens

Files are complete or absent and are written in sample order, so an interrupted job resumes after the last one. A
sample is looked up by its number, independent of the layout that wrote it; the digest shows whether it is the same
sample.
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

RECORD, FILE_NAME = "logits.json", re.compile(r"samples_(\d{12})\.safetensors")


class LogitsRecord(BaseModel):
    """Description of a folder of predictions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["megalith-teacher-logits"] = "megalith-teacher-logits"
    version: Literal[1] = 1
    teacher: str
    vocab_size: PositiveInt
    seq_length: PositiveInt
    top_k: PositiveInt
    temperature: PositiveFloat


class StoredLogits:
    """A folder of predictions, for reading and appending."""

    def __init__(self, folder: str | Path):
        """Open a folder. Raise DataError if it has no stored predictions, or if a file is missing or damaged."""
        self.folder = Path(folder)
        self.record = _read_record(self.folder / RECORD)
        matches = [match for path in self.folder.iterdir() if (match := FILE_NAME.fullmatch(path.name))]
        self._firsts = sorted(int(match[1]) for match in matches)
        self.samples = 0
        """Number of samples stored, counted from the start of the stream."""
        for first in self._firsts:
            if first != self.samples:
                raise DataError(
                    f"{self.folder} has no predictions of samples {self.samples:,} to {first:,}, "
                    f"because {_name(self.samples)} is missing; delete the files from "
                    f"{_name(first)} on, and write them again"
                )
            self.samples += len(_opened(self.folder / _name(first)).get_slice("digests")[:])

    @classmethod
    def create(cls, folder: str | Path, record: LogitsRecord) -> StoredLogits:
        """Create a folder, or open one with the same record. Raise DataError if it has other predictions."""
        path = Path(folder) / RECORD
        if not path.exists():
            with data_errors(path):
                make_folder(path.parent)
            with atomic_file(path) as file:
                file.write(json.dumps(record.model_dump(), indent=1).encode())
        stored = cls(folder)
        if stored.record != record:
            names = [name for name, value in record if getattr(stored.record, name) != value]
            differ = ", ".join(
                f"{name} {getattr(stored.record, name)}, not {getattr(record, name)}" for name in names
            )
            raise DataError(f"{folder} was started with {differ}; choose another folder, or delete this one")
        return stored

    def append(self, indices: Tensor, logprobs: Tensor, digests: Tensor) -> None:
        """Write the predictions of the next samples, on any device: `indices` int32 [samples, seq, k], `logprobs`
        float32 [samples, seq, k + 1] and `digests` int64 [samples].
        """
        tensors = {"indices": indices.int(), "logprobs": logprobs.float(), "digests": digests}
        with atomic_file(self.folder / _name(self.samples)) as file:
            file.write(save({name: each.cpu().contiguous() for name, each in tensors.items()}))
        self._firsts.append(self.samples)
        self.samples += len(digests)

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the predictions for a batch: the indices, int32 [batch, seq, k], and the log-probabilities, float32
        [batch, seq, k + 1].

        Raises:
            DataError: if a sample has no predictions, or differs from the stored sample.
        """
        sample_numbers = batch.sample_numbers.tolist()
        rows = [self._row(number) for number in sample_numbers]
        indices, logprobs, digests = (torch.stack(each) for each in zip(*rows))
        for number, stored, digest in zip(sample_numbers, digests.tolist(), digests_of(batch).tolist()):
            if stored != digest:
                raise DataError(
                    f"sample {number:,} of this run differs from the sample that {self.folder} has predictions for, "
                    "because the data, their order or the tokenizer have changed; store predictions with this run's "
                    "settings"
                )
        return indices, logprobs

    def _row(self, number: int) -> list[Tensor]:
        if number >= self.samples:
            raise DataError(
                f"{self.folder} has predictions of {self.samples:,} samples, but the run has reached sample "
                f"{number:,}; continue `megalith teacher-logits` for as many steps as this run"
            )
        first = self._firsts[bisect_right(self._firsts, number) - 1]
        path, record = self.folder / _name(first), self.record
        file, row = _opened(path), number - first
        row_tensors = [file.get_slice(name)[row : row + 1][0] for name in ("indices", "logprobs", "digests")]
        seq, k = record.seq_length, record.top_k
        if (row_tensors[0].shape, row_tensors[1].shape) != ((seq, k), (seq, k + 1)):
            raise DataError(
                f"{path} has predictions {[*row_tensors[0].shape]} per sample, but {RECORD} has {[seq, k]}; store "
                "the predictions again"
            )
        if (
            row_tensors[0].min() < 0
            or row_tensors[0].max() >= record.vocab_size
            or not row_tensors[1].isfinite().all()
        ):
            raise DataError(f"{path} has invalid predictions in row {row}; store the predictions again")
        return row_tensors


def digests_of(batch: Batch) -> Tensor:
    """Return a checksum of each sample's tokens, labels and positions, int64 [batch]."""
    rows = torch.stack([batch.input_ids, batch.labels, batch.position_ids], 1).cpu().numpy()
    return torch.tensor([zlib.crc32(row.tobytes()) for row in rows])


def _name(first: int) -> str:
    return f"samples_{first:012d}.safetensors"


def _read_record(path: Path) -> LogitsRecord:
    try:
        return LogitsRecord.model_validate_json(read_small_file(path, path.parent))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has no valid description"
        raise DataError(
            f"{path.parent} is not a folder of a teacher's predictions ({RECORD}: {reason}); "
            "create one with `megalith teacher-logits`"
        ) from error


@lru_cache(maxsize=16)
def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); delete it and the files after it, then store them again"
        ) from error
