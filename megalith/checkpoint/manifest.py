"""`manifest.json`: what a step folder holds, and everything of a run that is not a tensor.

It is written last, so a folder without one is not a checkpoint. It lists each file with its size and SHA-256, and
each global tensor with the pieces that it is stored in: a file, and the box of the tensor that stands there under the
key of `piece_key`. It carries a checksum of its own content; file names stay inside the folder, and pieces cover their
tensor.
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
MOST_MANIFEST = 2**30  # bytes; those of a run of a thousand ranks have some ten million


class DamagedCheckpointError(CheckpointError):
    """A step is not what was saved: another step may still be whole."""


def _inside_the_folder(name: str) -> str:
    path = PurePosixPath(name)
    if printable(name) != name:
        raise ValueError(f"{printable(name)} has characters that no file of a checkpoint has in its name")
    if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name or name == ".":
        raise ValueError(f"{name!r} is not a plain path inside the checkpoint")
    return name


def _in_order(bounds: list[int]) -> list[int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{bounds} ends before it begins")
    return bounds


Count = Annotated[int, Field(ge=0, lt=2**62)]  # of bytes, samples, elements: what 64 bits can count
Shape = Annotated[list[Count], Field(max_length=16)]
FileName = Annotated[str, AfterValidator(_inside_the_folder)]
Range = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_in_order)]  # [first, end)
PartName = Annotated[str, StringConstraints(pattern="^[a-z_]+$")]  # files are named after it


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileRecord(_Record):
    """A file as it was written: size in bytes, and SHA-256 in hexadecimal."""

    bytes: Count
    sha256: str


class TensorRecord(_Record):
    """A tensor's safetensors type code and shape."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class PieceRecord(_Record):
    """A box of a tensor, and the file that holds it, one of the manifest's."""

    file: str
    offset: Shape
    shape: Shape

    @property
    def extent(self) -> Extent:
        """The box."""
        return Extent(tuple(self.offset), tuple(self.shape))


class StoredTensor(TensorRecord):
    """A global tensor and its pieces, none where it has no elements."""

    pieces: list[PieceRecord]

    @model_validator(mode="after")
    def _cover_the_tensor(self) -> StoredTensor:
        if not covers_exactly(self.shape, [piece.extent for piece in self.pieces]):
            raise ValueError(f"its shards do not cover {self} once")
        return self


class TokenizerRecord(_Record):
    """Which tokenizer the run's data went through."""

    fingerprint: str
    vocab_size: Count


class DataRecord(_Record):
    """The files of an indexed dataset: their sizes in bytes, and the `.idx`'s SHA-256 in hexadecimal; or, of chat data,
    how many rows it makes, and the SHA-256 of its samples."""

    bin_bytes: Count = 0
    idx_bytes: Count = 0
    idx_sha256: str = ""
    rows: Count = 0
    samples_sha256: str = ""


class RunRecord(_Record):
    """A run at one moment, tensors apart: with the weights and optimizer state, all that is needed to go on."""

    step: Count
    """Updates made so far, skipped ones included."""

    consumed_samples: Count
    """Sequences consumed so far: the position of data, schedule and batch size."""

    skipped_steps: Count = 0
    """Of these steps those that fp16 skipped for an overflow: schedules do not count them."""

    skipped_samples: Count = 0
    """Their samples."""

    config: dict[str, Any]
    """The resolved configuration as plain values."""

    loss_scale: dict[str, float] = {}
    """State of a dynamic loss scale."""

    counters: dict[str, int | float] = {}
    """Running totals for the log, such as skipped steps."""

    left_out: list[Range] = []
    """[first, end) of each range of the data stream that the run left out after a loss spike."""

    abandoned: list[Range] = []
    """[first, end) of the save numbers in this folder of steps that are not this run's past: it has gone back since."""

    base: str | None = None
    """Of adapters: the fingerprint (fingerprint.py) of the weights that they were trained on."""

    tokenizer: TokenizerRecord | None = None

    data: dict[str, DataRecord] = {}
    """What the run trains on, by prefix. Empty: made-up samples, or a checkpoint from before this was kept."""


class Manifest(RunRecord):
    """A run's record with the files that complete it."""

    format: Literal["megalith-checkpoint"] = FORMAT
    format_version: Literal[2] = FORMAT_VERSION
    save_number: Count
    """1 for the first save into a checkpoints folder, then rising: the order of saving. A run that goes on
    from an early step saves lower steps after higher ones."""

    files: dict[FileName, FileRecord]
    tensors: dict[PartName, dict[str, StoredTensor]]
    """For each part (`model`, `optimizer`) its tensors by name."""

    @model_validator(mode="after")
    def _list_every_file(self) -> Manifest:
        if unlisted := {name for part in self.tensors for name in self.files_of(part)} - set(self.files):
            raise ValueError(f"files has no entry for {', '.join(sorted(unlisted))}")
        return self

    def files_of(self, part: str) -> set[str]:
        """The files with tensors of a part."""
        return {piece.file for tensor in self.tensors[part].values() for piece in tensor.pieces}


def manifest_text(content: dict[str, Any]) -> str:
    """The text of a manifest of this plain JSON, its own checksum first.

    Raises ValidationError where it would not be taken when it is read.
    """
    Manifest.model_validate(content)
    content = {**content, "format": FORMAT, "format_version": FORMAT_VERSION}
    return json.dumps({"checksum": content_checksum(content), **content}, allow_nan=False)


def piece_key(name: str, shape: Sequence[int], extent: Extent) -> str:
    """What a piece is called in its safetensors file: the tensor's name, with the ranges where it is a part of it.

    `embedding.weight[0:64,0:32]`: rows 0 to 63 and columns 0 to 31.
    """
    if extent == Extent.whole(shape):
        return name
    return f"{name}[{','.join(f'{at}:{stop}' for at, stop in zip(extent.offset, extent.end))}]"


def read_manifest(folder: Path | StorePath) -> Manifest:
    """Reads a step folder's manifest.

    Raises DamagedCheckpointError when it is absent or damaged, CheckpointError when it is of another version, or in a
    store that does not give it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(manifest_bytes(folder))
        checksum = content.pop("checksum")
        found = content_checksum(content)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a whole checkpoint; use another step"
        ) from None
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        if isinstance(path, StorePath) and isinstance(error, OSError) and not isinstance(error, RefusedFile):
            raise fetch_error(path, error) from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpointError(f"{path} is damaged ({reason}); use another step") from None
    if checksum != found:
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not have the checksum it states; use another step"
        )
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')!r}, this Megalith reads version "
            f"{FORMAT_VERSION}; "
            "use the Megalith that wrote it"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise DamagedCheckpointError(
            f"{path} is not a checkpoint's manifest: {first_problem(error)}; use another step"
        ) from None


def manifest_bytes(folder: Path | StorePath) -> bytes:
    """The content of a step's manifest, of a bounded size. Raises OSError."""
    return read_small_file(folder / MANIFEST, folder, MOST_MANIFEST)


def fetch_error(path: StorePath, error: OSError) -> CheckpointError:
    """What is said where a store does not give what may well be there."""
    told = f"{error.strerror or error}{f' ({error.filename})' if error.filename not in (None, str(path)) else ''}"
    return CheckpointError(
        f"{path} cannot be fetched: {told}; look at the URL, its credentials and the network"
    )


def first_problem(error: ValidationError) -> str:
    """Where the first mistake in a manifest's content is, and what."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def content_checksum(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content in one canonical spelling."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
