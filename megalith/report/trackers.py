"""Other places that a run's figures go to, when asked: TensorBoard and Weights & Biases.

A sink takes plain numbers under names such as `train/loss` and `validation/perplexity`, and writes them under these or
under Megatron-LM's. Another tracker needs a class with these three methods.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megalith.config import RunConfig
from megalith.errors import ConfigError, install_line
from megalith.io import make_folder, make_subfolder, reject_symlink, replace_file
from megalith.small_files import read_optional_file

BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Megatron-LM's name of the experts' balancing loss, by model.moe_router_load_balancing_type."""


class Tracker(Protocol):
    """Where figures go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the known, finite figures of `step`."""

    def rewind(self, step: int) -> None:
        """The steps after `step` are going to be made again: none may stand twice."""

    def close(self) -> None:
        """Writes out what is still held. The run is over."""


def open_trackers(config: RunConfig, start_step: int, logged: int) -> list[Tracker]:
    """The sinks that `log` asks for, of a run that goes on after `start_step` and has logged up to step `logged`.

    Raises ConfigError for one that is not installed.
    """
    output, log = config.train.output_dir, config.log
    balancing = config.model.moe_router_load_balancing_type
    names = MegatronNames(balancing).scalars if log.tracker_names == "megatron" else megalith_names
    sinks: list[Tracker] = []
    if log.tensorboard:
        sinks.append(TensorBoardTracker(output, start_step, log.tensorboard_dir, names))
    if log.wandb:
        run = (log.wandb_project, log.wandb_name, config.to_tree(), logged, log.wandb_entity, log.wandb_dir)
        sinks.append(WandbTracker(output, *run, names))
    return sinks


class Scalar(NamedTuple):
    """A figure as a tracker shows it."""

    name: str
    value: float
    position: int
    """On the tracker's axis: a step, or the samples consumed so far."""


Names = Callable[[int, Mapping[str, float]], Iterator[Scalar]]
"""(step, figures by our names) → what is written of them."""


def megalith_names(step: int, figures: Mapping[str, float]) -> Iterator[Scalar]:
    """Yield the figures under the names that they have."""
    return (Scalar(name, value, step) for name, value in figures.items())


class MegatronNames:
    """Figures under the tags of Megatron-LM's training.py. What it does not have keeps our name."""

    by_samples = {  # also written as "… vs samples"
        "train/loss": "lm loss",
        "train/lr": "learning-rate",
        "train/global_batch_size": "batch-size",
        "train/loss_scale": "loss-scale",
        "train/grad_norm": "grad-norm",
        "train/num_zeros": "num-zeros",
        "train/params_norm": "params-norm",
        "validation/loss": "lm loss validation",
        "validation/perplexity": "lm loss validation ppl",
    }
    by_steps = {
        "train/consumed_samples": "samples vs steps",
        "train/tflops_per_device": "throughput",
        "train/moe_z_loss": "z_loss",
    }

    def __init__(self, balancing: str = "aux_loss"):
        self._by_steps = {**self.by_steps, "train/moe_aux_loss": BALANCING_LOSSES.get(balancing, balancing)}
        self._samples = 0  # consumed at the last training step

    def scalars(self, step: int, figures: Mapping[str, float]) -> Iterator[Scalar]:
        """Yield the figures of a step, in its training or its validation."""
        if "train/consumed_samples" in figures:
            self._samples = int(figures["train/consumed_samples"])
            figures = {"train/loss_scale": 1.0, **figures}
        for name, value in figures.items():
            if name in self.by_samples:
                yield Scalar(self.by_samples[name], value, step)
                yield Scalar(f"{self.by_samples[name]} vs samples", value, self._samples)
            elif name == "train/step_time_ms":
                yield Scalar("iteration-time", value / 1e3, step)
            elif name.startswith("timers/"):
                yield Scalar(f"{name.removeprefix('timers/')}-time", value / 1e3, step)
            elif further := re.fullmatch(r"train/(mtp_\d+)_loss", name):
                yield Scalar(f"{further[1]} loss", value, step)
            else:
                yield Scalar(self._by_steps.get(name, name), value, step)


class TensorBoardTracker:
    """Event files in `OUTPUT/tensorboard` or `folder`.

    Events beyond `start_step`, of a process that crashed, are hidden. Not so under other `names` than ours, where some
    positions are samples, not steps: TensorBoard hides events of all names alike.
    """

    def __init__(
        self,
        output_dir: str | Path,
        start_step: int = 0,
        folder: str | None = None,
        names: Names = megalith_names,
    ):
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
        self._names, self._hides = names, names is megalith_names
        self._writer = self._open(purge_step=start_step + 1 if start_step and self._hides else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value, position in self._names(step, figures):
            self._writer.add_scalar(name, value, global_step=position)

    def rewind(self, step: int) -> None:
        if self._hides:
            self._writer.close()
            self._writer = self._open(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
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
        names: Names = megalith_names,
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
        self._names = names
        self._sent: dict[str, int] = {}  # the last step of each figure
        self._sent_before = sent
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # W&B's own counter refuses to go back on a resume

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        scalars = [scalar for scalar in self._names(step, figures) if not scalar.name.endswith(" vs samples")]
        new = {name: value for name, value, _ in scalars if step > self._sent.get(name, self._sent_before)}
        if new:
            self._run.log({"step": step, **new})
            self._sent.update(dict.fromkeys(new, step))

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _identity(path: Path) -> str:
    """The run's id at W&B, made where the file has none: it may be absent, or what a crash has left of it."""
    reject_symlink(path)
    found = (read_optional_file(path, path.parent, largest=4096) or b"").decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        found = uuid.uuid4().hex[:12]
        replace_file(path, found + "\n")
    return found
