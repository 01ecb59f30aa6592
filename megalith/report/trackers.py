"""Experiment trackers: TensorBoard and Weights & Biases.

A tracker gets numbers under names such as `train/loss` and `validation/perplexity`, and writes them under these names
or under Megatron-LM's. To add a tracker, write a class with the methods of `Tracker` and open it in `open_trackers`.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megalith.config import RunConfig
from megalith.errors import ConfigError, MegalithError, install_line
from megalith.io import make_folder, make_subfolder, reject_symlink, replace_file
from megalith.small_files import read_optional_file

BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""model.moe_router_load_balancing_type → Megatron-LM's name of the balancing loss."""


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, all of them finite."""

    def rewind(self, step: int) -> None:
        """Remove the metrics of the steps after `step`, which will be repeated."""

    def close(self) -> None:
        """Write buffered metrics at the end of the run."""


def open_trackers(config: RunConfig, start_step: int, logged: int) -> list[Tracker]:
    """Open the trackers that `config.log` enables.

    Args:
        start_step: the last completed step.
        logged: the last step that an earlier process logged.

    Raises:
        ConfigError: a tracker is not installed.
        OSError: a tracker's folder cannot be written.
    """
    output, log = config.train.output_dir, config.log
    balancing = config.model.moe_router_load_balancing_type
    names = MegatronNames(balancing).scalars if log.tracker_names == "megatron" else megalith_names
    opened: list[Tracker | None] = []
    if log.tensorboard:
        opened.append(_open(TensorBoardTracker, output, start_step, log.tensorboard_dir, names))
    if log.wandb:
        run = (log.wandb_project, log.wandb_name, config.to_tree(), logged, log.wandb_entity, log.wandb_dir)
        opened.append(_open(WandbTracker, output, *run, names))
    return [tracker for tracker in opened if tracker is not None]


def _open(tracker: Callable[..., Tracker], *arguments: Any) -> Tracker | None:
    """Open a tracker. Return None, with a warning, if its service fails: a failing tracker does not end a run."""
    try:
        return tracker(*arguments)
    except (MegalithError, OSError):  # it is not installed, or its folder cannot be written
        raise
    except Exception as error:
        warnings.warn(
            f"{tracker.__name__} is disabled, because it could not be opened ({type(error).__name__}: "
            f"{error}); metrics.jsonl in the output folder has all metrics",
            stacklevel=3,
        )
        return None


class Scalar(NamedTuple):
    """A value as a tracker shows it."""

    name: str
    value: float
    position: int
    """Position on the tracker's axis: a step, or the number of samples consumed so far."""


NameMapping = Callable[[int, Mapping[str, float]], Iterator[Scalar]]
"""Function from a step and its metrics under Megalith's names to the scalars to write."""


def megalith_names(step: int, metrics: Mapping[str, float]) -> Iterator[Scalar]:
    """Yield the metrics under Megalith's names."""
    return (Scalar(name, value, step) for name, value in metrics.items())


class MegatronNames:
    """Maps metrics to the tags of Megatron-LM's training.py. Other metrics keep Megalith's names."""

    by_samples = {  # also written as "… vs samples"
        "train/loss": "lm loss",
        "train/lr": "learning-rate",
        "train/global_batch_size": "batch-size",
        "train/loss_scale": "loss-scale",
        "train/grad_norm": "grad-norm",
        "train/num_zeros": "num-zeros",
        "train/params_norm": "params-norm",
        "train/max_attention_logit": "max_attention_logit",
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

    def scalars(self, step: int, metrics: Mapping[str, float]) -> Iterator[Scalar]:
        """Yield the scalars of a training step or of an evaluation."""
        if "train/consumed_samples" in metrics:
            self._samples = int(metrics["train/consumed_samples"])
            metrics = {"train/loss_scale": 1.0, **metrics}
        for name, value in metrics.items():
            if name in self.by_samples:
                yield Scalar(self.by_samples[name], value, step)
                yield Scalar(f"{self.by_samples[name]} vs samples", value, self._samples)
            elif name == "train/step_time_ms":
                yield Scalar("iteration-time", value / 1e3, step)
            elif name.startswith("timers/"):
                yield Scalar(f"{name.removeprefix('timers/')}-time", value / 1e3, step)
            elif mtp := re.fullmatch(r"train/(mtp_\d+)_loss", name):
                yield Scalar(f"{mtp[1]} loss", value, step)
            else:
                yield Scalar(self._by_steps.get(name, name), value, step)


class TensorBoardTracker:
    """Writes event files into `output_dir/tensorboard` or `folder`.

    Events after `start_step`, written by a process that crashed, are hidden (`purge_step`). With Megatron-LM's names
    they are not hidden: some positions are samples instead of steps, and TensorBoard would hide events of both kinds.
    """

    def __init__(
        self,
        output_dir: str | Path,
        start_step: int = 0,
        folder: str | None = None,
        names: NameMapping = megalith_names,
    ):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"log.tensorboard needs TensorBoard, which cannot be imported ({error}); install "
                f"it with: {install_line('log')}, or leave log.tensorboard out"
            ) from None
        if folder is None:
            folder = str(make_subfolder(Path(output_dir) / "tensorboard"))
        self._open = partial(SummaryWriter, folder)
        self._names, self._purges = names, names is megalith_names
        self._writer = self._open(purge_step=start_step + 1 if start_step and self._purges else None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value, position in self._names(step, metrics):
            self._writer.add_scalar(name, value, global_step=position)

    def rewind(self, step: int) -> None:
        if self._purges:
            self._writer.close()
            self._writer = self._open(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes to a Weights & Biases run. The run's id is stored in `output_dir/wandb_id`, so that a resumed job
    continues that run.

    With `WANDB_MODE=offline`, W&B's own setting, metrics are written into `output_dir/wandb` or below `directory`. W&B
    cannot remove metrics: if a step is repeated after a loss spike or a crash, W&B keeps the metrics from the first
    time.

    Args:
        config: the run's settings as plain values, shown next to the curves.
        sent: the last step that an earlier process sent.
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
        names: NameMapping = megalith_names,
    ):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb needs Weights & Biases, which cannot be imported ({error}); install "
                f"it with: {install_line('log')}, or leave log.wandb out"
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
            id=_load_or_create_id(folder / "wandb_id"),
            resume="allow",
            config=dict(config),
        )
        self._names = names
        self._sent: dict[str, int] = {}  # metric → the last step sent
        self._sent_before = sent
        self._run.define_metric("step")
        self._run.define_metric(
            "*", step_metric="step"
        )  # W&B's own step counter cannot decrease after a resume

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        scalars = [scalar for scalar in self._names(step, metrics) if not scalar.name.endswith(" vs samples")]
        new = {name: value for name, value, _ in scalars if step > self._sent.get(name, self._sent_before)}
        if new:
            self._run.log({"step": step, **new})
            self._sent.update(dict.fromkeys(new, step))

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _load_or_create_id(path: Path) -> str:
    """Return the run's W&B id. If the file is missing or was damaged by a crash, create a new id."""
    reject_symlink(path)
    run_id = (read_optional_file(path, path.parent, largest=4096) or b"").decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        run_id = uuid.uuid4().hex[:12]
        replace_file(path, run_id + "\n")
    return run_id
