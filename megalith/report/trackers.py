"""Other places that a run's figures go to, when asked: TensorBoard and Weights & Biases.

A sink takes plain numbers under names such as `train/loss` and `validation/perplexity`. Another tracker needs
a class with these three methods.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megalith.config import RunConfig
from megalith.errors import ConfigError, install_line
from megalith.io import make_folder, make_subfolder, refuse_link, replace_file


class Sink(Protocol):
    """Where figures go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the known, finite figures of `step`."""

    def rewind(self, step: int) -> None:
        """The steps after `step` are going to be made again: none may stand twice."""

    def close(self) -> None:
        """Writes out what is still held. The run is over."""


def open_sinks(config: RunConfig, start_step: int, logged: int) -> list[Sink]:
    """The sinks that `log` asks for, of a run that goes on after `start_step` and has logged up to step `logged`.

    Raises ConfigError for one that is not installed.
    """
    output, log = config.train.output_dir, config.log
    sinks: list[Sink] = []
    if log.tensorboard:
        sinks.append(TensorBoardSink(output, start_step, log.tensorboard_dir))
    if log.wandb:
        names = (log.wandb_project, log.wandb_name)
        sinks.append(WandbSink(output, *names, config.to_tree(), logged, log.wandb_entity, log.wandb_dir))
    return sinks


class TensorBoardSink:
    """Event files in `OUTPUT/tensorboard` or `folder`. Events beyond `start_step`, of a process that crashed, are
    hidden."""

    def __init__(self, output_dir: str | Path, start_step: int = 0, folder: str | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"log.tensorboard needs TensorBoard, which cannot be imported ({error}); "
                f"install it with: {install_line('log')}, or do without log.tensorboard"
            ) from None
        if folder is None:
            folder = str(make_subfolder(Path(output_dir) / "tensorboard"))
        self._open = partial(SummaryWriter, folder)
        self._writer = self._open(purge_step=start_step + 1 if start_step else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. Its id is kept in `OUTPUT/wandb_id`, so that a resumed job goes on with it.

    Mode is W&B's own setting: `WANDB_MODE=offline` writes into `OUTPUT/wandb`, or below `directory`, without a network.
    config: the run's settings as plain values, shown beside the curves. W&B takes nothing back: of a step that is made
    again, after a loss spike or a crash, it keeps the figures that it was sent first. `sent`: the last step that an
    earlier process sent.
    """

    def __init__(
        self,
        output_dir: str | Path,
        project: str,
        name: str | None,
        config: Mapping[str, Any],
        sent: int = 0,
        entity: str | None = None,
        directory: str | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb needs Weights & Biases, which cannot be imported ({error}); "
                f"install it with: {install_line('log')}, or do without log.wandb"
            ) from None
        folder = Path(output_dir)
        make_folder(folder)
        if directory is None:
            make_subfolder(folder / "wandb")
        else:
            make_folder(Path(directory))
        self._run = wandb.init(
            dir=directory or str(folder),
            entity=entity,
            project=project,
            name=name or folder.resolve().name,
            id=_identity(folder / "wandb_id"),
            resume="allow",
            config=dict(config),
        )
        self._sent: dict[str, int] = {}  # the last step of each figure
        self._sent_before = sent
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # W&B's own counter refuses to go back on a resume

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        new = {key: value for key, value in figures.items() if step > self._sent.get(key, self._sent_before)}
        if new:
            self._run.log({"step": step, **new})
            self._sent.update(dict.fromkeys(new, step))

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _identity(path: Path) -> str:
    """The run's id at W&B, made where the file has none: it may be absent, or what a crash has left of it."""
    refuse_link(path)
    found = path.read_text("utf-8", errors="replace").strip() if path.exists() else ""
    if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        found = uuid.uuid4().hex[:12]
        replace_file(path, found + "\n")
    return found
