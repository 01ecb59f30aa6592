"""`manifest.json`: what a step folder holds, and everything of a run that is not a tensor.

It is written last, so a folder without one is not a checkpoint. It lists each file with its size and SHA-256,
and carries a checksum of its own content; file names stay inside the folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator

from megalith.errors import CheckpointError

MANIFEST = "manifest.json"


class DamagedCheckpointError(CheckpointError):
    """A step is not what was saved: another step may still be whole."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(_Record):
    """A file as it was written: size in bytes, and SHA-256 in hexadecimal."""

    bytes: NonNegativeInt
    sha256: str


class TensorRecord(_Record):
    """A tensor's safetensors type code and shape."""

    dtype: str
    shape: list[NonNegativeInt]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class TokenizerRecord(_Record):
    """Which tokenizer the run's data went through."""

    fingerprint: str
    vocab_size: NonNegativeInt


class RunRecord(_Record):
    """A run at one moment, tensors apart: with the weights and optimizer state, all that is needed to go on."""

    step: NonNegativeInt
    """Updates made so far, skipped ones included."""

    consumed_samples: NonNegativeInt
    """Sequences consumed so far: the position of data, schedule and batch size."""

    config: dict[str, Any]
    """The resolved configuration as plain values."""

    loss_scale: dict[str, float] = {}
    """State of a dynamic loss scale."""

    counters: dict[str, int | float] = {}
    """Running totals for the log, such as skipped steps."""

    tokenizer: TokenizerRecord | None = None


def _inside_the_folder(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name or name == ".":
        raise ValueError(f"{name!r} is not a plain path inside the checkpoint")
    return name


FileName = Annotated[str, AfterValidator(_inside_the_folder)]


class Manifest(RunRecord):
    """A run's record with the files that complete it."""

    format: Literal["megalith-checkpoint"] = "megalith-checkpoint"
    format_version: Literal[1] = 1
    save_number: NonNegativeInt
    """1 for the first save into a checkpoints folder, then rising: the order of saving. A run that goes on
    from an early step saves lower steps after higher ones."""

    files: dict[FileName, FileRecord]
    tensors: dict[FileName, dict[str, TensorRecord]]
    """For each safetensors file, its tensors."""

    @model_validator(mode="after")
    def _list_every_file(self) -> Manifest:
        if unlisted := set(self.tensors) - set(self.files):
            raise ValueError(f"files has no entry for {', '.join(sorted(unlisted))}")
        return self

    def to_json(self) -> str:
        """The manifest's text, its own checksum first."""
        content = self.model_dump(mode="json")
        return json.dumps({"checksum": content_checksum(content), **content}, indent=1, allow_nan=False)


def read_manifest(folder: Path) -> Manifest:
    """Reads a step folder's manifest.

    Raises DamagedCheckpointError when it is absent or damaged, CheckpointError when it is of another version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a whole checkpoint; use another step"
        ) from None
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged ({error}); use another step") from None
    if checksum != content_checksum(content):
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not have the checksum it states; use another step"
        )
    if content.get("format_version") != 1:
        raise CheckpointError(
            f"{path} has format version {content.get('format_version')!r}, this Megalith reads version 1; "
            "use the Megalith that wrote it"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedCheckpointError(
            f"{path} is not a checkpoint's manifest: {where}: {first['msg']}; use another step"
        ) from None


def content_checksum(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content in one canonical spelling."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
