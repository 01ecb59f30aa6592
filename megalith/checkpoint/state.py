"""What a run is, as named tensors: the model's by their names, the optimizer's as `optim.{name}.{key}`.

Tensors are global and as small as their meaning: rows that only pad the vocabulary are not stored, so that a
checkpoint does not depend on the padding. They are zero after loading. Everything else of a run stands in
its record (step, consumed samples, configuration, loss scale).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megalith.checkpoint.files import tensor_record
from megalith.checkpoint.manifest import RunRecord
from megalith.checkpoint.open import Checkpoint
from megalith.checkpoint.store import save_step
from megalith.errors import CheckpointError

MODEL, OPTIMIZER = "model", "optimizer"
STATE_WITH_ROWS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # shaped like their parameter
NAMES_IN_ERROR = 10


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor that has two names (tied) under its first."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of each parameter: `optim.{name}.exp_avg` and so on. The groups must have `param_names`."""
    return {
        f"optim.{name}.{key}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
        for key, value in optimizer.state[parameter].items()
    }


def save_checkpoint(
    checkpoints: str | Path,
    record: RunRecord,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    unpadded_rows: Mapping[str, int] | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Saves a run into `checkpoints/step_NNNNNNNN` and returns that folder; see `store.save_step`.

    `unpadded_rows` gives for each padded parameter the rows that mean something: its rest, and that of its
    optimizer state, is not stored. Without `optimizer` the weights alone are saved.
    """
    rows = unpadded_rows or {}
    tensors = {MODEL: _cut(model_tensors(model), rows)}
    if optimizer is not None:
        tensors[OPTIMIZER] = _cut(optimizer_tensors(optimizer), _state_rows(rows))
    return save_step(Path(checkpoints), record, tensors, write_tokenizer, keep_last, keep_every)


def load_model(
    checkpoint: Checkpoint, model: nn.Module, unpadded_rows: Mapping[str, int] | None = None
) -> None:
    """Fills the model's parameters and buffers, in place and bitwise. All of them or, on an error, none.

    Raises CheckpointError naming tensors that are missing, unexpected, or of another shape or type.
    """
    _fill(checkpoint, MODEL, model_tensors(model), unpadded_rows or {})


def load_optimizer(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, unpadded_rows: Mapping[str, int] | None = None
) -> None:
    """Fills the optimizer's state, in place and bitwise. All of it or, on an error, nothing.

    Raises CheckpointError naming tensors that are missing, unexpected, or of another shape or type.
    """
    _fill(checkpoint, OPTIMIZER, optimizer_tensors(optimizer), _state_rows(unpadded_rows or {}))


def _state_rows(unpadded_rows: Mapping[str, int]) -> dict[str, int]:
    return {f"optim.{name}.{key}": rows for name, rows in unpadded_rows.items() for key in STATE_WITH_ROWS}


def _cut(tensors: Mapping[str, Tensor], unpadded_rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Each tensor, or the view of its meaningful rows."""
    return {
        name: tensor[: unpadded_rows[name]] if name in unpadded_rows else tensor
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def _fill(
    checkpoint: Checkpoint, part: str, tensors: Mapping[str, Tensor], unpadded_rows: Mapping[str, int]
) -> None:
    stored = _cut(tensors, unpadded_rows)
    _check_fit(checkpoint, part, stored)
    for name, value in checkpoint.tensors(part):
        stored[name].copy_(value)
    for name, rows in unpadded_rows.items():
        if name in tensors:
            tensors[name][rows:].zero_()


def _check_fit(checkpoint: Checkpoint, part: str, stored: Mapping[str, Tensor]) -> None:
    wanted = {name: tensor_record(tensor) for name, tensor in stored.items()}
    found = checkpoint.table(part)
    problems = [
        ("missing", [name for name in wanted if name not in found]),
        ("unexpected", [name for name in found if name not in wanted]),
        (
            "of another shape or type",
            [
                f"{name} (stored {found[name]}, needed {wanted[name]})"
                for name in wanted
                if name in found and found[name] != wanted[name]
            ],
        ),
    ]
    sentences = [f"{what}: {_shorten(names)}" for what, names in problems if names]
    if not sentences:
        return
    way_out = (
        "load it with the model configuration that it was saved with"
        if part == MODEL
        else "load it with the optimizer that it was saved with, or set checkpoint.load_optim to false"
    )
    raise CheckpointError(
        f"{checkpoint.folder} does not fit the {part} of this run; {'; '.join(sentences)}; {way_out}"
    )


def _shorten(names: list[str]) -> str:
    more = len(names) - NAMES_IN_ERROR
    return ", ".join(names[:NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
