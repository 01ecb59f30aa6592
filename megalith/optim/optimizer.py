"""Registry of optimizers, and `build_optimizer`, which builds the run's optimizer (`optim.optimizer`).

Every parameter is fp32 and is its own main weight: the model casts to the compute dtype where it uses one, so gradients
arrive in fp32 and no second copy is kept. Each parameter group stores the names of its parameters (`param_names`), and
a checkpoint stores a parameter's state under its name.

Optimizers create their state when they are built, not in the first step. A checkpoint can then be loaded in place, the
memory is known before training starts, and a first step that is skipped for a non-finite gradient leaves the state at
zero (torch's fused SGD would leave its momentum uninitialised and use it).

An optimizer is a file in this folder with a builder that `register_optimizer` decorates, and its import in `__init__`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.config.mup import MupRatios
from megalith.config.optim import ParamGroup
from megalith.config.rules.optim_rules import check_muon, check_param_groups
from megalith.errors import ConfigError, nearest_of
from megalith.optim.averages import add_ema
from megalith.optim.combined import combine
from megalith.optim.mup_rates import RateFactors, rate_factors
from megalith.optim.offload import OffloadedOptimizer, select_for_offload
from megalith.optim.patterns import check_patterns, group_of


@dataclass(frozen=True)
class Placement:
    """Position of this rank's shard in the global parameter. The defaults describe an unsharded parameter."""

    gather: Callable[[Tensor], Tensor] = lambda shard: shard
    """Function from a tensor shaped like the shard to the global tensor; additional leading dimensions may stack
    several tensors. Collective: all ranks call it for the same parameters in the same order.
    """
    shard: Callable[[Tensor], Tensor] = lambda whole: whole
    """Function from a global tensor to this rank's shard."""
    sum: Callable[[Tensor, Collection[int]], Tensor] = lambda tensor, dims: tensor
    """Function from a tensor to its sum over the ranks that shard one of the parameter's dimensions `dims`. Collective,
    like `gather`."""
    shared: Any = None
    """Sharding of a matrix over ranks. Its `key` is equal for matrices that can be collected together; `ranks` is the
    number of ranks. None: one rank has the whole matrix, or the parameter is not a matrix.
    """
    collect: Callable[[Sequence[Any], Sequence[Tensor], Sequence[float]], Any] | None = None
    """Callable (list of `shared`, shards, costs) → collection of the matrices on their owners (parallel/owners.py)."""
    owned: Callable[[Sequence[Any], Sequence[float]], list[int]] | None = None
    """Callable (list of `shared`, costs) → indices of the matrices that this rank owns."""
    matrices: Sequence[int] | None = None
    """Matrices fused into a layer's weight [rows, columns] or [experts, rows, columns], as the numbers of rows at which
    they alternate: (rows,) for a single matrix, (1, 1) for two that alternate row by row. None: not a matrix of a
    layer."""
    fused: Literal["qkv", "gate_up"] | None = None
    """Kind of a fused weight: query, key and value of attention, or gate and up of a gated MLP."""
    heads: Sequence[int] | None = None
    """Rows per attention head of each of `matrices`. None: not a projection to heads."""
    shape: Sequence[int] | None = None
    """Shape of the global parameter. None: the shard's."""
    rows: int | None = None
    """Rows of the global parameter that are not padding. None: all."""
    offset: Sequence[int] | None = None
    """Index of the shard's first element in the global parameter. None: zeros."""
    seed: int = 0
    """Seed of the run, for stochastic rounding."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter as optimizers receive it."""

    name: str
    parameter: nn.Parameter
    """Plain fp32 shard of this rank; may be empty."""
    placement: Placement
    offloaded: bool = False
    """True if the state belongs in host memory."""
    group: ParamGroup | None = None
    """Entry of `optim.param_groups` that applies."""
    ratios: MupRatios | None = None
    """Size of the model relative to its base model. None: no µP."""
    factors: RateFactors = field(default_factory=RateFactors)
    """Factors of µP on rate, epsilon and decay; `build_named` sets them."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global parameter without padding rows."""
        shape = tuple(self.placement.shape or self.parameter.shape)
        return shape if self.placement.rows is None else (self.placement.rows, *shape[1:])

    @property
    def state_device(self) -> torch.device:
        return torch.device("cpu") if self.offloaded else self.parameter.device


# Builds an optimizer from parameters, settings and the run's precision (fp32, bf16 or fp16).
Builder = Callable[[Sequence[TrainedParameter], OptimConfig, str], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Registration:
    build: Builder
    supports_offload: bool
    state_bytes: Callable[[OptimConfig], tuple[float, float]]

    @property
    def is_built_in(self) -> bool:
        return self.build.__module__.startswith("megalith.")


_REGISTERED: dict[str, _Registration] = {}


MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1 + 4 / 256}  # fp8: with a scale per block of 256


def adam_bytes(config: OptimConfig) -> tuple[float, float]:
    """Return the bytes of Adam's moments per parameter, in layers and outside of layers."""
    both = MOMENT_BYTES[config.exp_avg_dtype] + MOMENT_BYTES[config.exp_avg_sq_dtype]
    return both, both


def state_bytes_of(name: str, config: OptimConfig) -> tuple[float, float]:
    """Return the bytes of state per parameter of the optimizer `name`, in layers and outside of layers."""
    return _REGISTERED[name].state_bytes(config)


def state_bytes(config: OptimConfig) -> tuple[float, float]:
    """Return the optimizer state in bytes per parameter, in layers and outside of layers, including a moving average.

    Vectors are counted like matrices, because they are few. With several optimizers, the one with the largest state is
    counted.
    """
    names = [config.optimizer, *(group.optimizer for group in config.param_groups if group.optimizer)]
    sizes = [state_bytes_of(name, config) for name in names]
    ema = 0 if config.ema_decay is None else 4
    return ema + max(layers for layers, _ in sizes), ema + max(outside for _, outside in sizes)


def register_optimizer(
    name: str,
    *,
    supports_offload: bool = False,
    state_bytes: Callable[[OptimConfig], tuple[float, float]] = adam_bytes,
) -> Callable[[Builder], Builder]:
    """Register the decorated function as the builder of the optimizer `name`, a value of `optim.optimizer`.

    The builder receives the trained parameters, the settings and the run's precision, and returns a
    `torch.optim.Optimizer`:

    - Its groups come from `decay_groups`, or have the keys `param_names` and `decays`.
    - State created by the builder can be loaded from a checkpoint. State under a key in `STATE_WITH_ROWS`
      (checkpoint/state.py) is sharded like its parameter.
    - `step` takes no argument. If the class sets `_step_supports_amp_scaling`, `step` divides gradients by
      `self.grad_scale` and changes nothing if `self.found_inf` is 1. Otherwise it receives gradients already divided,
      and the host waits for the device to decide whether to step.

    Args:
        name: value of `optim.optimizer`.
        supports_offload: allow `optim.optimizer_cpu_offload`. The optimizer must be torch's Adam, AdamW or SGD, or a
            subclass with the same update, and keep each parameter's state on its `state_device`.
        state_bytes: function from the settings to the bytes of state per parameter, in layers and outside of them, for
            memory estimates. Default: Adam's.

    Raises:
        ConfigError: `name` is a built-in optimizer.
    """
    if name in _REGISTERED and _REGISTERED[name].is_built_in:
        raise ConfigError(
            f"the optimizer {name!r} is built in and cannot be replaced; register yours under another name, and set "
            "optim.optimizer to it"
        )

    def register(build: Builder) -> Builder:
        _REGISTERED[name] = _Registration(build, supports_offload, state_bytes)
        return build

    return register


def check_optimizer(config: OptimConfig) -> None:
    """Raise ConfigError if an optimizer is not registered or does not support the other settings."""
    for setting, name in _optimizer_names(config):
        if name not in _REGISTERED:
            raise ConfigError(
                f"{setting} {name!r} is not known{nearest_of(name, sorted(_REGISTERED))}; choose one of "
                "these, or register it with megalith.register_optimizer"
            )
    check_param_groups(config)
    check_muon(config)
    if config.reduces_moments and config.optimizer_cpu_offload:
        raise ConfigError(
            f"optim.optimizer_cpu_offload requires moments in fp32, but optim.exp_avg_dtype is {config.exp_avg_dtype} "
            f"and optim.exp_avg_sq_dtype is {config.exp_avg_sq_dtype}; turn it off, or leave both at fp32"
        )
    if config.optimizer_cpu_offload and not _REGISTERED[config.optimizer].supports_offload:
        names = ", ".join(name for name, one in _REGISTERED.items() if one.supports_offload)
        raise ConfigError(
            f"optim.optimizer_cpu_offload supports {names}, but optim.optimizer is {config.optimizer}; turn it off, or "
            "choose one of these"
        )


def _optimizer_names(config: OptimConfig) -> list[tuple[str, str]]:
    """Return the optimizers in use, each with the setting that names it."""
    groups = [
        (f"optim.param_groups: the optimizer of the group {group.pattern!r},", group.optimizer)
        for group in config.param_groups
        if group.optimizer is not None
    ]
    names = [("optim.optimizer", config.optimizer), *groups]
    scalar = ("optim.muon_scalar_optimizer", config.muon_scalar_optimizer)
    return names + [scalar] * any(name == "muon" for _, name in names)


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    shared_names: Collection[str] = (),
    placements: Mapping[str, Placement] | None = None,
    precision: str = "fp32",
    all_names: Collection[str] | None = None,
    ratios: MupRatios | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that `config.optimizer` names, with its state at zero.

    Weight decay applies to matrices, not to norms, biases and 1-D parameters. Frozen parameters are skipped. With
    `optimizer_cpu_offload`, part of the state of parameters on a GPU is created in host memory. `param_groups` may
    assign other settings and optimizers to parameters by name.

    Args:
        named_parameters: fp32 parameters, possibly local shards, by name.
        config: optimizer settings.
        shared_names: names of parameters that other ranks hold too. They are offloaded only if all parameters are.
            Otherwise ranks might choose differently, and copies updated on a CPU and on a GPU would diverge.
        placements: position of each shard in its global parameter, by name.
        precision: fp32, bf16 or fp16.
        all_names: names of the trained parameters of all ranks. Default: the names on this rank.
        ratios: size of the model relative to its base model. None means no µP.

    Raises:
        ConfigError: `lr` is not set, a trained parameter is not fp32, the name is not registered, or a pattern of
            `param_groups` applies to no parameter.
    """
    check_optimizer(config)
    if config.lr is None:
        raise ConfigError("optim.lr is not set; set it to the peak learning rate, for example 3e-4")
    placements = placements or {}
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; trained parameters are fp32 in every precision: "
                "call model.float() and set train.precision for the compute type"
            )
    check_patterns([name for name, _ in trained] if all_names is None else all_names, config)
    on_gpu = [(name, parameter) for name, parameter in trained if parameter.device.type != "cpu"]
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    offloaded = select_for_offload(on_gpu, fraction, shared_names if fraction < 1 else ())
    items = [
        TrainedParameter(
            name,
            parameter,
            placements.get(name, Placement()),
            name in offloaded,
            group_of(name, config),
            ratios,
        )
        for name, parameter in trained
    ]
    optimizer = build_parts(items, config, precision)
    set_learning_rate(optimizer, config.lr, config.weight_decay, config.decoupled_lr)
    if config.ema_decay is not None:
        add_ema(optimizer)
    on_host = [item.parameter for item in items if item.offloaded]
    if not on_host:
        return optimizer
    return OffloadedOptimizer(optimizer, on_host, config.overlap_cpu_optimizer_d2h_h2d)


def build_named(
    name: str, items: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    """Build the registered optimizer `name` for `items`, with the factors that µP prescribes for it."""
    items = [
        replace(item, factors=rate_factors(item.name, item.parameter.ndim, name, item.ratios))
        for item in items
    ]
    return _REGISTERED[name].build(items, config, precision)


def build_parts(
    items: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    """Build the optimizer of `items`, a combination of several if `param_groups` assigns different optimizers."""
    parts: dict[str, list[TrainedParameter]] = {config.optimizer: []}
    for item in items:
        name = (item.group and item.group.optimizer) or config.optimizer
        parts.setdefault(name, []).append(item)
    order = [name for name in dict.fromkeys(name for _, name in _optimizer_names(config)) if name in parts]
    return combine([build_named(name, parts[name], config, precision) for name in order])


# Parameters with the learning rate `decoupled_lr`, if it is set.
DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")


def decay_groups(parameters: Sequence[TrainedParameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Return parameter groups for torch, split by weight decay, `decoupled_lr`, and the rates of `param_groups` and µP.

    The list is never empty, even on a pipeline rank without parameters.
    """
    by_kind: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for item in parameters:
        group = item.group or ParamGroup(pattern=item.name)
        has_rate = group.lr is not None
        decoupled = config.decoupled_lr is not None and item.name in DECOUPLED and not has_rate
        if has_rate:
            factor = group.lr / config.lr
        else:
            factor = (1.0 if decoupled else item.factors.lr) * (
                1.0 if group.lr_mult is None else group.lr_mult
            )
        decays = _decays(item) if group.weight_decay is None else group.weight_decay > 0
        kind = decays, decoupled, factor, group.weight_decay, item.factors.eps, item.factors.weight_decay
        by_kind.setdefault(kind, []).append((item.name, item.parameter))
    groups = [
        {
            "params": by_kind[kind],
            "decays": kind[0],
            "decoupled": kind[1],
            "lr_mult": kind[2],
            "fixed_decay": kind[3],
            "eps": config.adam_eps * kind[4],
            "decay_mult": kind[5],
        }
        for kind in sorted(by_kind, key=lambda kind: (not kind[0], *kind[1:3], kind[3] or 0.0, *kind[4:]))
    ]
    return groups or [{"params": [], "param_names": [], "decays": False, "decoupled": False}]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Set the learning rate of each parameter group for this step, and the weight decay of groups with decay.

    Args:
        optimizer: optimizer whose parameter groups are changed in place.
        lr: rate of the schedule, multiplied by a group's `lr_mult`.
        weight_decay: decay of the schedule, multiplied by a group's `decay_mult`.
        decoupled_lr: rate of the decoupled groups (embedding and head) in place of `lr`.
    """
    for group in optimizer.param_groups:
        base = lr if decoupled_lr is None or not group.get("decoupled") else decoupled_lr
        group["lr"] = base * group.get("lr_mult", 1.0)
        fixed = group.get("fixed_decay")
        decay = weight_decay * group.get("decay_mult", 1.0) if group["decays"] else 0.0
        group["weight_decay"] = decay if fixed is None else fixed


def _decays(item: TrainedParameter) -> bool:
    *_, module, kind = ["", *item.name.split(".")]
    return item.parameter.dim() > 1 and kind != "bias" and not module.endswith("layernorm")
