"""A run's state as named tensors: the model's under their names, the optimizer's as `optim.{name}.{key}`.

Tensors are global and without rows that only pad the vocabulary, so that a checkpoint does not depend on the padding;
loading sets these rows to zero. The rest of the state is in the record (step, consumed samples, configuration, loss
scale).

Checkpoints of a model with adapters contain only the adapters. The frozen rest is in the base, the weights that the run
began from.

Ranks may hold complete tensors or shards in any layout. The stored form is the same, so a run can resume in any layout.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalith.checkpoint.agree import collectively
from megalith.checkpoint.files import DTYPE_CODES, byte_count
from megalith.checkpoint.fingerprint import fingerprint
from megalith.checkpoint.manifest import TensorRecord
from megalith.checkpoint.read import Checkpoint, files_for
from megalith.comm.collectives import Axis, gather_json
from megalith.errors import CheckpointError, shorten
from megalith.models.adapters import ADAPTER, is_trained_with_adapters
from megalith.models.saved_modules import saved_names_of
from megalith.models.score_model import SCORE
from megalith.ops.fp8.recipes import AmaxTable
from megalith.optim.moments import Moment
from megalith.parallel.coded_base import coded_weights
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard, local_shard, named_shards
from megalith.progress import Progress

MODEL, OPTIMIZER, AMAXES = "model", "optimizer", "amaxes"
STATE_WITH_ROWS = ("exp_avg", "exp_avg_slow", "exp_avg_sq", "momentum_buffer", "variance", "z", "ema")
"""Optimizer state with the shape of its parameter."""
REDUCED_STATE = {"row_var": -1, "col_var": -2}
"""Optimizer state with one element along this dimension of its parameter."""
WHOLE_STATE = (
    "soap_exp_avg",
    "soap_exp_avg_sq",
    "soap_left",
    "soap_right",
    "soap_left_basis",
    "soap_right_basis",
    "soap_left_values",
    "soap_right_values",
)
"""Optimizer state of whole matrices, held by the ranks that own them. For experts, it is sharded over the experts."""

Model = nn.Module | Sequence[nn.Module]  # a model, or the chunks of a pipeline rank


def model_shards(model: Model) -> dict[str, LocalShard]:
    """Return parameters and persistent buffers by name. A tied tensor appears under its first name."""
    return named_shards(_chunks(model))


def base_shards(model: Model) -> dict[str, LocalShard]:
    """Return `model_shards` without adapters."""
    return {name: shard for name, shard in model_shards(model).items() if ADAPTER not in name}


def checkpoint_shards(model: Model) -> dict[str, LocalShard]:
    """Return the shards that the run's checkpoints contain: all shards or, with adapters, only the trained ones."""
    shards = model_shards(model)
    if not any(getattr(chunk, "has_adapters", False) for chunk in _chunks(model)):
        return shards
    saved = saved_names_of(_chunks(model))
    return {name: shard for name, shard in shards.items() if is_trained_with_adapters(name, saved)}


def _chunks(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def optimizer_shards(optimizer: torch.optim.Optimizer, model: Model | None) -> dict[str, LocalShard]:
    """Return the state of each parameter as `optim.{name}.exp_avg` and so on. The groups must have `param_names`.

    Moments of reduced precision (`Moment`) are float32 in checkpoints. The optimizer updates the local shards of
    `model`'s parameters; without `model` they are unsharded.
    """
    parameters = {} if model is None else model_shards(model)
    shards = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            for key, value in optimizer.state[parameter].items():
                if name in parameters and key in STATE_WITH_ROWS:
                    shard = replace(parameters[name], values=value)
                elif name in parameters and key in REDUCED_STATE:
                    shard = _reduced_shard(parameters[name], value, REDUCED_STATE[key])
                elif name in parameters and key in WHOLE_STATE:
                    shard = _whole_shard(parameters[name], value)
                elif isinstance(value, Moment):
                    shard = LocalShard(value, (0,) * len(value.shape), tuple(value.shape), owned=True)
                else:
                    shard = local_shard(value)
                shards[f"optim.{name}.{key}"] = shard
    return shards


def _reduced_shard(parameter: LocalShard, values: Tensor, dim: int) -> LocalShard:
    """Return the shard of a state that has one element along `dim`.

    Ranks with different slices of `dim` hold the same values.
    """
    shape, offset = list(parameter.shape), list(parameter.offset)
    owned = parameter.owned and offset[dim] == 0
    shape[dim], offset[dim] = 1, 0
    return LocalShard(values, tuple(offset), tuple(shape), owned)


def _whole_shard(parameter: LocalShard, values: Tensor) -> LocalShard:
    """Return the shard of optimizer state for complete matrices: this rank's experts, or a single matrix."""
    shape, offset = list(values.shape), [0] * values.ndim
    if len(parameter.shape) == 3:
        shape[0], offset[0] = parameter.shape[0], parameter.offset[0]
    return LocalShard(values, tuple(offset), tuple(shape), owned=True)


def state_shards(
    model: Model, optimizer: torch.optim.Optimizer | None, unpadded_rows: Mapping[str, int] | None = None
) -> dict[str, dict[str, LocalShard]]:
    """Return this rank's stored state by checkpoint part and name. Without `optimizer`, return only the weights."""
    rows = unpadded_rows or {}
    shards = {MODEL: _unpad(checkpoint_shards(model), rows)}
    if optimizer is not None:
        shards[OPTIMIZER] = _unpad(optimizer_shards(optimizer, model), _state_rows(rows))
    return shards


def load_model(
    checkpoint: Checkpoint,
    model: Model,
    unpadded_rows: Mapping[str, int] | None = None,
    world: Axis = ALONE,
    show_progress: bool = False,
) -> None:
    """Load the model's parameters and buffers in place, bitwise. On an error, nothing is changed.

    Loads only adapters if the model has them; `load_base` loads the rest. Collective over `world`. Raises
    CheckpointError, identically on every rank, naming tensors that are missing, unexpected, or of another shape or
    dtype.
    """
    _fill(checkpoint, MODEL, checkpoint_shards(model), unpadded_rows or {}, world, show_progress)


def check_model_fits(checkpoint: Checkpoint, model: Model, unpadded_rows: Mapping[str, int]) -> None:
    """Raise the CheckpointError that `load_model` would. The model is unsharded and may be on the meta device."""
    _check_fit(checkpoint, MODEL, _unpad(checkpoint_shards(model), unpadded_rows), ALONE)


def load_base(
    checkpoint: Checkpoint,
    shards: Mapping[str, LocalShard],
    unpadded_rows: Mapping[str, int] | None = None,
    world: Axis = ALONE,
    show_progress: bool = False,
    unused: Collection[str] = (),
) -> None:
    """Load `base_shards` of a model, or some of them, from a checkpoint of a model without adapters. See `load_model`.

    The checkpoint may have tensors of the names `unused`, which are not read.
    """
    _fill(checkpoint, MODEL, shards, unpadded_rows or {}, world, show_progress, unused)


def base_fingerprint(
    model: Model, unpadded_rows: Mapping[str, int] | None = None, world: Axis = ALONE
) -> str | None:
    """Return the fingerprint of all weights except adapters on rank 0, None on other ranks.

    Collective over `world`.

    Modules in `lora.modules_to_save` must have the base's values.
    """
    shards = {name: x for name, x in base_shards(model).items() if name != SCORE}
    sampled = {
        name: weight.base_sample for chunk in _chunks(model) for name, weight in coded_weights(chunk).items()
    }
    return fingerprint(_unpad(shards, unpadded_rows or {}), world, sampled)


def load_optimizer(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    unpadded_rows: Mapping[str, int] | None = None,
    model: Model | None = None,
    world: Axis = ALONE,
    show_progress: bool = False,
) -> None:
    """Load the optimizer's state in place, bitwise. On an error, nothing is changed.

    `model` is required if the optimizer updates shards of its parameters. Collective over `world`. Raises
    CheckpointError, identically on every rank, naming tensors that are missing, unexpected, or of another shape or
    dtype. Only Muon's step counter may be missing or unexpected, because Muon has it only with some settings. If it is
    missing, it starts at 0.
    """
    shards, rows = optimizer_shards(optimizer, model), _state_rows(unpadded_rows or {})
    stored = checkpoint.table(OPTIMIZER)
    shards = {
        name: shard for name, shard in shards.items() if name in stored or not _is_counter(name, shards)
    }
    unused = [name for name in stored if _is_counter(name, stored)]
    _fill(checkpoint, OPTIMIZER, shards, rows, world, show_progress, unused)


def _is_counter(name: str, state: Container[str]) -> bool:
    """Return True for the counter of steps of a parameter that has a momentum in `state`."""
    return name.endswith(".step") and f"{name.removesuffix('step')}momentum_buffer" in state


def load_part(
    checkpoint: Checkpoint,
    part: str,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    unpadded_rows: Mapping[str, int],
    world: Axis = ALONE,
) -> None:
    """Load the weights of an additional model from its checkpoint part and, with `optimizer`, the optimizer's state.

    Collective over `world`. Raises CheckpointError in the same cases as `load_model` and `load_optimizer`, and if the
    checkpoint does not have the part.
    """
    if part not in checkpoint.manifest.tensors:
        raise CheckpointError(
            f"{checkpoint.folder} has no {part}; resume with the settings that it was saved with"
        )
    if optimizer is None:
        _fill(checkpoint, part, model_shards(model), unpadded_rows, world, False)
    else:
        _fill(checkpoint, part, optimizer_shards(optimizer, model), _state_rows(unpadded_rows), world, False)


def amax_shards(table: AmaxTable | None, world: Axis) -> dict[str, dict[str, LocalShard]]:
    """Return the state of FP8 delayed scaling as a checkpoint part.

    Every rank holds all of it. Empty without a table.
    """
    state = {} if table is None else table.state()
    shards = {
        name: LocalShard(values.contiguous(), (0,) * values.ndim, tuple(values.shape), owned=world.rank == 0)
        for name, values in state.items()
    }
    return {AMAXES: shards} if shards else {}


def load_amaxes(checkpoint: Checkpoint, table: AmaxTable | None, world: Axis = ALONE) -> None:
    """Load an FP8 table from the checkpoint, if it contains one. Collective over `world`.

    Raises CheckpointError, identically on every rank, if it has another shape or is damaged.
    """
    stored = checkpoint.manifest.tensors.get(AMAXES, {})
    if table is None or not stored:
        return
    others = [
        f"{name} {stored[name].shape}"
        for name, values in table.state().items()
        if name in stored  # the length of histories may differ
        and (len(stored[name].shape), *stored[name].shape[-1:]) != (values.ndim, values.shape[-1])
    ]
    if others:
        raise CheckpointError(
            f"{checkpoint.folder} has FP8 scales of another shape: {shorten(others)}; load only its weights, with "
            "model.init_from"
        )
    collectively(world, lambda: checkpoint.check_contents(checkpoint.manifest.files_of(AMAXES)))
    table.load_state(stored, partial(checkpoint.read, AMAXES))


def _state_rows(unpadded_rows: Mapping[str, int]) -> dict[str, int]:
    keys = (*STATE_WITH_ROWS, *(key for key, dim in REDUCED_STATE.items() if dim == -1))
    return {f"optim.{name}.{key}": rows for name, rows in unpadded_rows.items() for key in keys}


def _unpad(shards: Mapping[str, LocalShard], unpadded_rows: Mapping[str, int]) -> dict[str, LocalShard]:
    """Remove padding rows from the shards."""
    return {
        name: shard.first_rows(unpadded_rows[name]) if name in unpadded_rows else shard
        for name, shard in shards.items()
    }


@torch.no_grad()
def _fill(
    checkpoint: Checkpoint,
    part: str,
    shards: Mapping[str, LocalShard],
    unpadded_rows: Mapping[str, int],
    world: Axis,
    show_progress: bool,
    unused: Collection[str] = (),
) -> None:
    stored = _unpad(shards, unpadded_rows)
    _check_fit(checkpoint, part, stored, world, unused)
    collectively(world, lambda: checkpoint.check_contents(files_for(checkpoint.manifest, part, stored)))
    total = sum(byte_count(shard.values.shape, shard.values.dtype) for shard in stored.values())
    with Progress(f"load {part}", total, show=show_progress) as progress:
        collectively(world, lambda: _fill_shards(checkpoint, part, shards, stored, progress))


def _fill_shards(
    checkpoint: Checkpoint,
    part: str,
    shards: Mapping[str, LocalShard],
    stored: Mapping[str, LocalShard],
    progress: Progress,
) -> None:
    """Fill `stored`, which are the rows of `shards` that exist in the checkpoint, and set the other rows to zero."""
    moments = {name: shard for name, shard in stored.items() if isinstance(shard.values, Moment)}
    checkpoint.fill(part, {name: shard for name, shard in stored.items() if name not in moments}, progress)
    for name, shard in moments.items():
        values = shards[name].values
        wide = torch.zeros(values.shape, device=values.device)
        checkpoint.fill(part, {name: replace(shard, values=wide[: len(shard.values)])}, progress)
        values.copy_(wide)
    for name in stored.keys() - moments.keys():
        if stored[name].shape != shards[name].shape:
            shards[name].values[len(stored[name].values) :].zero_()


def _check_fit(
    checkpoint: Checkpoint,
    part: str,
    shards: Mapping[str, LocalShard],
    world: Axis,
    unused: Collection[str] = (),
) -> None:
    table = checkpoint.table(part)
    expected = {
        name: TensorRecord(dtype=DTYPE_CODES[shard.values.dtype], shape=list(shard.shape))
        for name, shard in shards.items()
    }
    mismatches = [
        f"{name} (stored {table[name]}, needed {expected[name]})"
        for name in expected
        if name in table and str(table[name]) != str(expected[name])
    ]
    all_names = {name: None for names in gather_json(list(expected), world) for name in names}
    all_mismatches = {text: None for texts in gather_json(mismatches, world) for text in texts}
    problems = [
        ("missing", [name for name in all_names if name not in table]),
        ("unexpected", [name for name in table if name not in all_names and name not in unused]),
        ("of another shape or type", list(all_mismatches)),
    ]
    sentences = [f"{kind}: {shorten(names)}" for kind, names in problems if names]
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
