"""A whole step, and its tensors: any box of any of them, wherever its pieces stand.

A reader takes the intersections of the box that it wants with the pieces that are stored. Files are mapped, so of a
piece only the pages that are wanted are read; and a file is compared with the manifest when it is first opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.extent import Extent
from megalith.checkpoint.files import DTYPES, open_safetensors
from megalith.checkpoint.manifest import Manifest, PieceRecord, StoredTensor, TensorRecord, piece_key
from megalith.checkpoint.steps import TOKENIZER
from megalith.parallel.shards import Box


@dataclass(frozen=True)
class Checkpoint:
    """A step folder whose files were found to be what its manifest says."""

    folder: Path
    manifest: Manifest

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the run's tokenizer was saved, if it was."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def table(self, part: str) -> dict[str, StoredTensor]:
        """Type and global shape of each tensor of a part (`model`, `optimizer`)."""
        return self.manifest.tensors[part]

    def tensors(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a part with its name, whole, on the CPU."""
        for name in self.table(part):
            yield name, self.read(part, name)

    def read(self, part: str, name: str, extent: Extent | None = None) -> Tensor:
        """A tensor on the CPU, or the box `extent` of it."""
        stored = self.table(part)[name]
        extent = extent or Extent.whole(stored.shape)
        values = torch.empty(extent.shape, dtype=DTYPES[stored.dtype])
        self.fill(part, {name: Box(values, extent.offset, tuple(stored.shape), owned=True)})
        return values

    def fill(self, part: str, boxes: Mapping[str, Box]) -> None:
        """Copies into the values of the boxes, of any device, what is stored. Raises CheckpointError."""
        for file, wanted in self._pieces_for(part, boxes).items():
            with self._open(file) as tensor:
                for name, piece, box in wanted:
                    there = _extent(box)
                    both = piece.extent.meet(there)
                    stored = tensor(piece_key(name, box.shape, piece.extent))
                    box.values[both.slices(there)].copy_(stored[both.slices(piece.extent)])

    def check_contents(self, files: Iterable[str] | None = None) -> None:
        """Raises CheckpointError where the tensors in a file (default: any) are not those that the manifest lists."""
        for file in self._contents if files is None else files:
            with self._open(file):
                pass

    @contextmanager
    def _open(self, file: str) -> Iterator[Callable[[str], Tensor]]:
        """A file's tensors by their keys; it is compared with the manifest the first time."""
        with open_safetensors(
            self.folder / file, None if file in self._compared else self._contents[file]
        ) as tensor:
            self._compared.add(file)
            yield tensor

    def _pieces_for(
        self, part: str, boxes: Mapping[str, Box]
    ) -> dict[str, list[tuple[str, PieceRecord, Box]]]:
        files: dict[str, list[tuple[str, PieceRecord, Box]]] = {}
        for name, box in boxes.items():
            for piece in self.table(part)[name].pieces:
                if piece.extent.meet(_extent(box)):
                    files.setdefault(piece.file, []).append((name, piece, box))
        return files

    @cached_property
    def _compared(self) -> set[str]:
        """Files that hold what the manifest lists."""
        return set()

    @cached_property
    def _contents(self) -> dict[str, dict[str, TensorRecord]]:
        """The pieces of each file, by their keys."""
        contents: dict[str, dict[str, TensorRecord]] = {}
        for named in self.manifest.tensors.values():
            for name, stored in named.items():
                for piece in stored.pieces:
                    key = piece_key(name, stored.shape, piece.extent)
                    record = TensorRecord(dtype=stored.dtype, shape=piece.shape)
                    contents.setdefault(piece.file, {})[key] = record
        return contents


def files_for(manifest: Manifest, part: str, boxes: Mapping[str, Box]) -> set[str]:
    """The files that hold pieces of the boxes; names that the manifest does not have are passed over."""
    table = manifest.tensors[part]
    return {
        piece.file
        for name, box in boxes.items()
        if name in table and len(table[name].shape) == len(box.shape)
        for piece in table[name].pieces
        if piece.extent.meet(_extent(box))
    }


def _extent(box: Box) -> Extent:
    return Extent(box.offset, tuple(box.values.shape))
