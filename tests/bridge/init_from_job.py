"""Jobs in which the ranks of a layout read a Hugging Face folder."""

from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from megalith.bridge.exporter import export_hf
from megalith.bridge.folder import SourceFolder
from megalith.checkpoint import read as opening
from megalith.config import RunConfig
from megalith.parity.job import start, state_by_name


def begin(config: RunConfig) -> dict[str, Tensor]:
    """The weights that training begins with, as a checkpoint would hold them, on rank 0."""
    return {
        name: value for name, value in state_by_name(start(config)).items() if not name.startswith("optim.")
    }


def export_from(config: RunConfig, out: Path) -> None:
    """Saves the weights that training begins with, from all ranks, and exports them on the first."""
    trainer = start(config)
    trainer.save()
    if trainer.mesh.world.rank == 0:
        export_hf(trainer.output, out, show_progress=False)


class Counted:
    """A tensor of a folder that counts the bytes taken from it."""

    def __init__(self, tensor: Tensor, taken: list[int]):
        self._tensor, self._taken = tensor, taken

    @property
    def T(self) -> "Counted":
        return Counted(self._tensor.T, self._taken)

    def __getitem__(self, index: object) -> Tensor:
        part = self._tensor[index]
        self._taken.append(part.nbytes)
        return part


def reads(config: RunConfig) -> int:
    """Return the number of bytes of the folder's weights that this rank reads."""
    taken: list[int] = []
    read = SourceFolder.read
    with patch.object(SourceFolder, "read", lambda folder, name: Counted(read(folder, name), taken)):
        start(config)
    return sum(taken)


def hashed(config: RunConfig) -> list[str]:
    """The files of a checkpoint whose checksums this rank computes while it begins."""
    names: list[str] = []
    with patch.object(
        opening, "file_record", lambda path, inner=opening.file_record: names.append(path.name) or inner(path)
    ):
        start(config)
    return names


def base_of(config: RunConfig) -> str | None:
    """The fingerprint of the weights that a run with adapters began from; on rank 0."""
    return start(config).base
