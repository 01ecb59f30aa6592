"""Settings of checkpoints that are written and loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config.base import Decides
from megalith.config.model import ModelConfig
from megalith.launch.lock import LOCK_NAME

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


def saving(flags: ParsedFlags) -> None:
    """Set train.output_dir from --save, and the intervals and events of saving checkpoints there.

    Checkpoints are written with latest_checkpointed_iteration.txt. Without --save nothing is saved. Signals trigger a
    save only with --exit-signal-handler.
    """
    folder = flags["--save"]
    flags.set("train.output_dir", folder or _free_folder("output"))
    if folder is None:
        flags.set("checkpoint.save_at_end", False)
        flags.tree["checkpoint"].pop("save_interval", None)
        flags.notes.append(
            f"without --save no checkpoint is written; metrics and logs go to {flags.tree['train']['output_dir']}"
        )
    else:
        flags.set("checkpoint.megatron_tracker", True)
    if folder is None:
        flags.set("checkpoint.save_when_stopped", "never")
    elif not flags["--exit-signal-handler"]:
        flags.set("checkpoint.save_when_stopped", "at_exits")
    if flags["--save-retain-interval"] is not None:
        flags.set("checkpoint.keep_last", 1)
        flags.set("checkpoint.keep_every", flags["--save-retain-interval"])


def _free_folder(name: str) -> str:
    """Return the first of name, name-2, name-3, … without metrics of another run."""
    number = 1
    while (Path(folder := name if number == 1 else f"{name}-{number}") / "metrics.jsonl").exists():
        number += 1
    return folder


def loading(flags: ParsedFlags) -> None:
    """Set checkpoint.load, or model.init_from with --finetune or --pretrained-checkpoint.

    model.init_from loads only weights, at step 0. A folder without a checkpoint is ignored. With
    --exit-on-missing-checkpoint, it is an error.
    """
    load, step = flags["--load"], flags["--ckpt-step"]
    if load is not None and step is not None and not is_empty(Path(load)):
        load = _at_step(load, step)
    if load is None and flags["--exit-on-missing-checkpoint"]:
        flags.problems.append(
            "--exit-on-missing-checkpoint needs --load; add --load, or remove --exit-on-missing-checkpoint"
        )
    exact = flags["--exit-on-missing-checkpoint"] or load != flags["--load"]
    if load is not None and is_empty(Path(load)) and not exact:
        if flags["--save"] is None or Path(load).resolve() != Path(flags["--save"]).resolve():
            flags.notes.append(f"--load {load} has no checkpoint: training starts at step 0, as in Megatron")
            load = None
        elif flags["--finetune"]:
            load = None
    if flags["--finetune"] and load is not None:
        flags.set("model.init_from", load)
    elif load is not None:
        flags.set("checkpoint.load", load)
    if flags["--pretrained-checkpoint"] and not (flags["--finetune"] and load):
        flags.set("model.init_from", flags["--pretrained-checkpoint"])
    if load is None or is_empty(Path(load)):
        return
    if flags["--use-checkpoint-args"]:
        _take_stored(flags, load, "model", ModelConfig.fields_deciding(Decides.FUNCTION))
        if flags["--seq-length"] is flags["--encoder-seq-length"] is None:
            _take_stored(flags, load, "data", ("seq_length",))
            if "seq_length" not in flags.tree.get("data", {}):
                flags.problems.append(
                    f"--seq-length is missing, and the checkpoint in --load {load} is not from a Megalith run, so "
                    "--use-checkpoint-args cannot take the length from it; set --seq-length"
                )
    if flags["--use-checkpoint-opt_param-scheduler"] or flags["--use-checkpoint-opt-param-scheduler"]:
        _take_stored(flags, load, "optim", SCHEDULE_OF_CHECKPOINT)


SCHEDULE_OF_CHECKPOINT = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
    "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip


def is_empty(folder: Path) -> bool:
    """Return True if a folder is missing, empty, or a Megalith run without a checkpoint."""
    if not folder.is_dir():
        return True
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        return not any((folder / "checkpoints").glob("step_*"))
    return all(entry.name == LOCK_NAME for entry in folder.iterdir())


def _at_step(load: str, step: int) -> str:
    """Return the folder of one step of a Megalith or Megatron run."""
    ours = Path(load, "checkpoints").is_dir()
    return f"{load}/checkpoints/step_{step:08d}" if ours else f"{load}/iter_{step:07d}"


def _take_stored(flags: ParsedFlags, load: str, section: str, names: Collection[str]) -> None:
    """Set `names` in `section` to the values of the run in `load`. For foreign weights, remove them instead."""
    from megalith.bridge.load import is_foreign_folder  # imports torch
    from megalith.checkpoint.open import open_checkpoint
    from megalith.errors import MegalithError

    try:
        if is_foreign_folder(load):  # the model is read from it, the schedule is not
            explicit = flags.tree.get(section, {})
            flags.tree[section] = {name: value for name, value in explicit.items() if name not in names}
            return
        checkpoint = open_checkpoint(load, ())
    except MegalithError as error:
        flags.problems.extend(str(error).split("\n"))
        return
    stored: Mapping[str, Any] = checkpoint.manifest.config.get(section, {}) if checkpoint else {}
    flags.tree.setdefault(section, {}).update(
        {name: value for name, value in stored.items() if name in names}
    )
