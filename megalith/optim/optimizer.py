"""Registry of optimizers, and `build_optimizer`, which builds the one that `optim.optimizer` names.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.errors import ConfigError, nearest_of
from megalith.optim.offload import OffloadedOptimizer, select_for_offload


@dataclass(frozen=True)
class Placement:
    """Position of this rank's shard in the global parameter. The defaults describe an unsharded parameter."""

    gather: Callable[[Tensor], Tensor] = lambda shard: shard
    """Function from a tensor shaped like the shard to the global tensor; leading dimensions may stack several.
    Collective: all ranks call it for the same parameters in the same order."""
    shard: Callable[[Tensor], Tensor] = lambda whole: whole
    """Function from a global tensor to this rank's shard."""
    matrices: Sequence[int] | None = None
    """Matrices fused into a layer's weight [rows, columns] or [experts, rows, columns], as the numbers of rows at which
    they alternate: (rows,) for a single matrix, (1, 1) for two that alternate row by row. None: not a matrix of a
    layer."""
    shape: Sequence[int] | None = None
    """Shape of the global parameter. None: the shard's."""
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
    """The state belongs in host memory."""

    @property
    def state_device(self) -> torch.device:
        return torch.device("cpu") if self.offloaded else self.parameter.device


# Builds an optimizer from parameters, settings and the run's precision (fp32, bf16 or fp16).
Builder = Callable[[Sequence[TrainedParameter], OptimConfig, str], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Registration:
    build: Builder
    supports_offload: bool

    @property
    def is_built_in(self) -> bool:
        return self.build.__module__.startswith("megalith.")


_REGISTERED: dict[str, _Registration] = {}


def register_optimizer(name: str, *, supports_offload: bool = False) -> Callable[[Builder], Builder]:
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

    Raises:
        ConfigError: `name` is a built-in optimizer.
    """
    if name in _REGISTERED and _REGISTERED[name].is_built_in:
        raise ConfigError(
            f"the optimizer {name!r} is built in and cannot be replaced; register yours under another name, and set "
            "optim.optimizer to it"
        )

    def register(build: Builder) -> Builder:
        _REGISTERED[name] = _Registration(build, supports_offload)
        return build

    return register


def check_optimizer(config: OptimConfig) -> None:
    """Raise ConfigError if `config.optimizer` is not registered or does not support the other settings."""
    if config.optimizer not in _REGISTERED:
        raise ConfigError(
            f"optim.optimizer {config.optimizer!r} is not known{nearest_of(config.optimizer, sorted(_REGISTERED))}; "
            "give one of these, or register it with megalith.register_optimizer"
        )
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


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    shared_names: Collection[str] = (),
    placements: Mapping[str, Placement] | None = None,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """Build the optimizer that `config.optimizer` names, with its state at zero.

    Weight decay applies to matrices, not to norms, biases and 1-D parameters. Frozen parameters are skipped. With
    `optimizer_cpu_offload`, part of the state of parameters on a GPU is created in host memory.

    Args:
        named_parameters: fp32 parameters, possibly local shards, by name.
        config: optimizer settings.
        shared_names: parameters that other ranks hold too. They are offloaded only if everything is: ranks would
            otherwise choose differently, and copies updated on a CPU and on a GPU would drift apart.
        placements: position of each shard in its global parameter, by name.
        precision: fp32, bf16 or fp16.

    Raises:
        ConfigError: `lr` is not set, a trained parameter is not fp32, or the name is not registered.
    """
    check_optimizer(config)
    if config.lr is None:
        raise ConfigError("optim.lr is not set; training needs the highest learning rate, for example 3e-4")
    placements = placements or {}
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; trained parameters are fp32 in every precision: "
                "call model.float() and set train.precision for the compute type"
            )
    on_gpu = [(name, parameter) for name, parameter in trained if parameter.device.type != "cpu"]
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    offloaded = select_for_offload(on_gpu, fraction, shared_names if fraction < 1 else ())
    items = [
        TrainedParameter(name, parameter, placements.get(name, Placement()), name in offloaded)
        for name, parameter in trained
    ]
    optimizer = _REGISTERED[config.optimizer].build(items, config, precision)
    set_learning_rate(optimizer, config.lr, config.weight_decay, config.decoupled_lr)
    on_host = [item.parameter for item in items if item.offloaded]
    if not on_host:
        return optimizer
    return OffloadedOptimizer(optimizer, on_host, config.overlap_cpu_optimizer_d2h_h2d)


# Parameters with the learning rate `decoupled_lr`, if it is set.
DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")


def decay_groups(parameters: Sequence[TrainedParameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Return parameter groups for torch, split by weight decay and by `decoupled_lr`.

    The list is never empty, although a pipeline rank may hold no parameter.
    """
    by_kind: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for item in parameters:
        kind = _decays(item), config.decoupled_lr is not None and item.name in DECOUPLED
        by_kind.setdefault(kind, []).append((item.name, item.parameter))
    groups = [
        {"params": by_kind[decays, decoupled], "decays": decays, "decoupled": decoupled}
        for decays in (True, False)
        for decoupled in (False, True)
        if (decays, decoupled) in by_kind
    ]
    return groups or [{"params": [], "param_names": [], "decays": False, "decoupled": False}]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Set this step's learning rates, and the weight decay of the groups with weight decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr if decoupled_lr is None or not group.get("decoupled") else decoupled_lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _decays(item: TrainedParameter) -> bool:
    *_, module, kind = ["", *item.name.split(".")]
    return item.parameter.dim() > 1 and kind != "bias" and not module.endswith("layernorm")
