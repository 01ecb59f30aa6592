"""`manifest.json`: the files and tensors of a step folder, and the run's state that is not a tensor.

It is written last, so a folder without it is not a checkpoint. It lists each file with size and SHA-256, and each
global tensor with its pieces. A piece is a box of the tensor, stored in one file under the key `piece_key`. The
manifest contains a checksum of its own content. File names cannot lead out of the folder, and pieces must cover their
tensor exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from megalith.checkpoint.extent import Extent, covers_exactly
from megalith.errors import CheckpointError, printable
from megalith.remote import StorePath
from megalith.small_files import RefusedFile, read_small_file

MANIFEST = "manifest.json"
FORMAT, FORMAT_VERSION = "megalith-checkpoint", 2
MAX_MANIFEST = 2**30  # bytes; a run with a thousand ranks has about ten million


class DamagedCheckpointError(CheckpointError):
    """Raised if a step differs from what was saved. Another step may be intact."""


def _inside_the_folder(name: str) -> str:
    path = PurePosixPath(name)
    if printable(name) != name:
        raise ValueError(
            f"{printable(name)} contains control or unencodable characters, which are not allowed in names "
            "of checkpoint files"
        )
    if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name or name == ".":
        raise ValueError(f"{name!r} is not a plain path inside the checkpoint")
    return name


def _in_order(bounds: list[int]) -> list[int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{bounds} ends before it begins")
    return bounds


Count = Annotated[int, Field(ge=0, lt=2**62)]  # bytes, samples, elements
Shape = Annotated[list[Count], Field(max_length=16)]
FileName = Annotated[str, AfterValidator(_inside_the_folder)]
Range = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_in_order)]  # [first, end)
PartName = Annotated[str, StringConstraints(pattern="^[a-z_]+$")]  # used in file names


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileRecord(_Record):
    """Size in bytes and SHA-256 in hexadecimal of a file."""

    bytes: Count
    sha256: str


class TensorRecord(_Record):
    """A tensor's shape, and its dtype as a code of safetensors."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class PieceRecord(_Record):
    """A box of a tensor, and the file that contains it."""

    file: str
    offset: Shape
    shape: Shape

    @property
    def extent(self) -> Extent:
        return Extent(tuple(self.offset), tuple(self.shape))


class StoredTensor(TensorRecord):
    """A global tensor and its pieces. A tensor without elements has no pieces."""

    pieces: list[PieceRecord]

    @model_validator(mode="after")
    def _cover_the_tensor(self) -> StoredTensor:
        if not covers_exactly(self.shape, [piece.extent for piece in self.pieces]):
            raise ValueError(f"its shards do not cover {self} exactly once")
        return self


class TokenizerRecord(_Record):
    """Identity of the tokenizer that the data was processed with."""

    fingerprint: str
    vocab_size: Count


class DataRecord(_Record):
    """Identity of training data.

    For an indexed dataset: file sizes in bytes and the SHA-256 of the `.idx`, in hexadecimal. For chat data: the number
    of rows and the SHA-256 of the samples. For text that the run tokenized: also the SHA-256 of the `.bin`.
    """

    bin_bytes: Count = 0
    idx_bytes: Count = 0
    idx_sha256: str = ""
    rows: Count = 0
    samples_sha256: str = ""


class RunRecord(_Record):
    """State of a run besides tensors. Weights, optimizer state and this record suffice to resume."""

    step: Count
    """Number of steps so far, including skipped ones."""

    consumed_samples: Count
    """Sequences consumed so far: the position of data, schedule and batch size."""

    skipped_steps: Count = 0
    """Steps skipped for an fp16 overflow, which schedules do not count."""

    skipped_samples: Count = 0
    """Number of samples in the skipped steps."""

    config: dict[str, Any]
    """Resolved configuration as plain values."""

    loss_scale: dict[str, float] = {}
    """State of a dynamic loss scale."""

    counters: dict[str, int | float] = {}
    """Running totals for the log, such as skipped steps."""

    left_out: list[Range] = []
    """Ranges [first, end) of the data stream that were skipped after loss spikes."""

    abandoned: list[Range] = []
    """Ranges [first, end) of save numbers in this folder that do not belong to this run's history, because it has gone
    back."""

    base: str | None = None
    """Fingerprint (fingerprint.py) of the base weights of adapters."""

    tokenizer: TokenizerRecord | None = None

    data: dict[str, DataRecord] = {}
    """Training data by prefix. Empty for mock data and in older checkpoints."""


class Manifest(RunRecord):
    """A run's record together with its files and tensors."""

    format: Literal["megalith-checkpoint"] = FORMAT
    format_version: Literal[2] = FORMAT_VERSION
    save_number: Count
    """Position in the order of saves, from 1. A run resumed from an early step saves lower steps after higher ones."""

    files: dict[FileName, FileRecord]
    tensors: dict[PartName, dict[str, StoredTensor]]
    """Tensors by part (`model`, `optimizer`) and name."""

    @model_validator(mode="after")
    def _list_every_file(self) -> Manifest:
        if unlisted := {name for part in self.tensors for name in self.files_of(part)} - set(self.files):
            raise ValueError(f"files has no entry for {', '.join(sorted(unlisted))}")
        return self

    def files_of(self, part: str) -> set[str]:
        """Return the files that contain tensors of a checkpoint part."""
        return {piece.file for tensor in self.tensors[part].values() for piece in tensor.pieces}


def manifest_text(content: dict[str, Any]) -> str:
    """Return a manifest's JSON text for this content, beginning with its checksum.

    Raises ValidationError if the content would be rejected when read.
    """
    Manifest.model_validate(content)
    content = {**content, "format": FORMAT, "format_version": FORMAT_VERSION}
    return json.dumps({"checksum": content_checksum(content), **content}, allow_nan=False)


def piece_key(name: str, shape: Sequence[int], extent: Extent) -> str:
    """Return a piece's key in its safetensors file: the tensor's name, with index ranges if the piece is not the
    whole tensor.

    `embedding.weight[0:64,0:32]` is rows 0 to 63 and columns 0 to 31.
    """
    if extent == Extent.full(shape):
        return name
    return f"{name}[{','.join(f'{at}:{stop}' for at, stop in zip(extent.offset, extent.end))}]"


def read_manifest(folder: Path | StorePath) -> Manifest:
    """Read a step folder's manifest.

    Raises:
        DamagedCheckpointError: it is missing or damaged.
        CheckpointError: it has another format version, or the store does not return it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(manifest_bytes(folder))
        checksum = content.pop("checksum")
        computed = content_checksum(content)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a complete checkpoint; use another step"
        ) from None
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        if isinstance(path, StorePath) and isinstance(error, OSError) and not isinstance(error, RefusedFile):
            raise fetch_error(path, error) from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpointError(f"{path} is damaged ({reason}); use another step") from None
    if checksum != computed:
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not match its checksum; use another step"
        )
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')!r}, but this version of Megalith reads "
            f"{FORMAT_VERSION}; use the version that wrote it"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise DamagedCheckpointError(
            f"{path} is not a valid manifest: {first_problem(error)}; use another step"
        ) from None


def manifest_bytes(folder: Path | StorePath) -> bytes:
    """Return the content of a step's manifest, limited in size. Raises OSError."""
    return read_small_file(folder / MANIFEST, folder, MAX_MANIFEST)


def fetch_error(path: StorePath, error: OSError) -> CheckpointError:
    """Return the error for a file that a store fails to return although it may exist."""
    file = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
    return CheckpointError(
        f"{path} cannot be fetched: {error.strerror or error}{file}; check the URL, its credentials and the network"
    )


def first_problem(error: ValidationError) -> str:
    """Describe the first validation error, with its location."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def content_checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content in canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
