"""What the ranks of a layout do with a Hugging Face folder."""

from pathlib import Path

from torch import Tensor

from megalith.bridge import stored
from megalith.bridge.exporter import export_hf
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
    folder = trainer.save()
    if trainer.mesh.world.rank == 0:
        export_hf(folder, out, show_progress=False)


def reads(config: RunConfig) -> int:
    """How many bytes of the folder's weights this rank uses while it begins."""
    used = 0
    read = stored.Stored.read
