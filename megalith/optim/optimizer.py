"""PyTorch's fused optimizers over fp32 parameters, with Megatron's weight-decay groups.

Every parameter is fp32 and is its own master weight: the model casts to the compute dtype where it uses one, so
gradients arrive in fp32 and no second copy is kept. Parameters are passed with their names, and each group stores them
(`param_names`), so that a checkpoint can store a parameter's state under its name.

The state is created here rather than in the first step, for three reasons. A checkpoint loads into it in place. Its
memory is known before training starts. And a first step that is skipped because of a non-finite gradient leaves it at
zero (torch's fused SGD would leave its momentum uninitialised and use it). Part of the state can be in host memory
(offload.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.errors import ConfigError, nearest_of
from megalith.optim.adamw import AdamW
from megalith.optim.moments import ReducedAdam
from megalith.optim.offload import OffloadedOptimizer, kept_on_host


@dataclass(frozen=True)
class Placement:
    """How this rank's shard of a parameter stands to the whole. Plain: the shard is the whole."""

    whole: Callable[[Tensor], Tensor] = lambda shard: shard
    """Of a tensor like the shard the whole, or of a stack of matrices whole ones: a collective call, in the order of
    the parameters."""
    own: Callable[[Tensor], Tensor] = lambda whole: whole
    """This rank's shard of what `whole` gives."""
    matrices: Sequence[int] | None = None
    """Of a layer's matrix [rows, columns], or [experts, rows, columns]: the matrices that it consists of, whose rows
    alternate in runs of so many: (rows,) where it is one, (1, 1) where they alternate. None: embedding, head, bias …"""
    shape: Sequence[int] | None = None
    """Of the global parameter; None: the shard's."""
    offset: Sequence[int] | None = None
    """Where the shard begins in it; None: at the first element."""
    seed: int = 0
    """The run's, by which moments are rounded."""


@dataclass(frozen=True)
class TrainedParameter:
    """What an optimizer gets of each parameter: a plain fp32 shard, which may be empty, and where it stands."""

    name: str
    parameter: nn.Parameter
    placement: Placement


# Makes an optimizer of the parameters; the last is the run's precision: fp32, bf16 or fp16.
Builder = Callable[[Sequence[TrainedParameter], OptimConfig, str], torch.optim.Optimizer]
_REGISTERED: dict[str, Builder] = {}


def register_optimizer(name: str) -> Callable[[Builder], Builder]:
    """Lets `optim.optimizer` name what the decorated function builds.

    Its groups are those of `decay_groups`, or others with `param_names` and `decays`. State that it makes
    at once, and not in its first step, is there to load a checkpoint into; in it, what is named as in STATE_WITH_ROWS
    of checkpoint/state.py is sharded as its parameter is. `step` takes no argument. Where the class has
    `_step_supports_amp_scaling`, it divides gradients by `self.grad_scale` and changes nothing where `self.found_inf`
    is 1; otherwise gradients come divided, and the host waits for the device to know whether to step.
    Raises ConfigError for the name of a built-in optimizer.
    """
    if name in (*BUILT_IN, "muon"):
        raise ConfigError(
            f"the optimizer {name!r} is built in and cannot be replaced; register yours under another name, and set "
            "optim.optimizer to it"
        )

    def register(build: Builder) -> Builder:
        _REGISTERED[name] = build
        return build

    return register


def check_optimizer(config: OptimConfig) -> None:
    """Raises ConfigError for a name that stands for no optimizer, and where it cannot do what is asked."""
    known = sorted({*BUILT_IN, *_REGISTERED})
    if config.optimizer not in known:
        raise ConfigError(
            f"optim.optimizer {config.optimizer!r} is not known{nearest_of(config.optimizer, known)}; give one of "
            "these, or register it with megalith.register_optimizer"
        )
    if config.reduces_moments and config.optimizer_cpu_offload:
        raise ConfigError(
            f"optim.optimizer_cpu_offload steps moments in fp32, and optim.exp_avg_dtype is {config.exp_avg_dtype}, "
            f"optim.exp_avg_sq_dtype {config.exp_avg_sq_dtype}; turn it off, or leave both at fp32"
        )
    if config.optimizer not in BUILT_IN and config.optimizer_cpu_offload:
        raise ConfigError(
            f"optim.optimizer_cpu_offload keeps the state of {', '.join(BUILT_IN)} on the host, and optim.optimizer is "
            f"{config.optimizer}; turn it off, or choose one of these"
        )


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    held_elsewhere: Collection[str] = (),
    placements: Mapping[str, Placement] | None = None,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay), Adam (decay added to the gradient) or SGD with momentum, fused, state at zero; or what
    is registered under the name that `config.optimizer` gives, Muon included.

    Weight decay applies to matrices, not to norms, biases and 1-D parameters. Frozen parameters are left out.
    Parameters may be local shards; `placements` has where they stand in the whole, by name. Their names are kept in
    each group's `param_names`. With `optimizer_cpu_offload`
    the state of a share of the parameters on a GPU is made in the host's memory. Unless it is all, parameters that are
    `held_elsewhere` too are not among them: a rank with others beside them would choose otherwise, and copies that a
    CPU and a GPU step drift apart.
    Raises ConfigError when `lr` is not set, a parameter that is to be trained is not fp32, or the name is not known.
    """
    check_optimizer(config)
    if config.lr is None:
        raise ConfigError("optim.lr is not set; training needs the highest learning rate, for example 3e-4")
    placements = placements or {}
    trained = [
        TrainedParameter(name, parameter, placements.get(name, Placement()))
        for name, parameter in named_parameters
        if parameter.requires_grad
    ]
    for item in trained:
        if item.parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {item.name} is {item.parameter.dtype}; trained parameters are fp32 in every precision: "
                "call model.float() and set train.precision for the compute type"
            )
    if config.optimizer not in BUILT_IN:
        optimizer = _REGISTERED[config.optimizer](trained, config, precision)
        set_learning_rate(optimizer, config.lr, config.weight_decay, config.decoupled_lr)
        return optimizer
    on_gpu = [(item.name, item.parameter) for item in trained if item.parameter.device.type != "cpu"]
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    names = kept_on_host(on_gpu, fraction, held_elsewhere if fraction < 1 else ())
    optimizer = BUILT_IN[config.optimizer](trained, config, names)
    on_host = [parameter for name, parameter in on_gpu if name in names]
    if not on_host:
        return optimizer
    return OffloadedOptimizer(optimizer, on_host, config.overlap_cpu_optimizer_d2h_h2d)


ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")  # that have decoupled_lr where it is set


def decay_groups(parameters: Sequence[TrainedParameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Groups for torch: what weight decay applies to, and what not, of each what has `decoupled_lr` apart; a pipeline
    rank may hold nothing."""
    by_kind: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for item in parameters:
        kind = _decays(item), config.decoupled_lr is not None and item.name in ENDS
        by_kind.setdefault(kind, []).append((item.name, item.parameter))
    groups = [
        {"params": by_kind[decays, decoupled], "decays": decays, "decoupled": decoupled}
        for decays in (True, False)
        for decoupled in (False, True)
        if (decays, decoupled) in by_kind
    ]
    return groups or [{"params": [], "param_names": [], "decays": False, "decoupled": False}]


def adamw(
    parameters: Sequence[TrainedParameter], config: OptimConfig, on_host: Collection[str] = ()
) -> torch.optim.Optimizer:
    """AdamW with its state at zero, that of the names `on_host` in the host's memory."""
    if config.reduces_moments:
        return _with_state(
            ReducedAdam, parameters, config, on_host, **_adam(config), decoupled_weight_decay=True
        )
    return _with_state(AdamW, parameters, config, on_host, **_adam(config))


def _plain_adam(
    parameters: Sequence[TrainedParameter], config: OptimConfig, on_host: Collection[str]
) -> torch.optim.Optimizer:
    kind = ReducedAdam if config.reduces_moments else torch.optim.Adam
    return _with_state(kind, parameters, config, on_host, **_adam(config))


def _sgd(
    parameters: Sequence[TrainedParameter], config: OptimConfig, on_host: Collection[str]
) -> torch.optim.Optimizer:
    return _with_state(torch.optim.SGD, parameters, config, on_host, momentum=config.sgd_momentum)


BUILT_IN = {"adamw": adamw, "adam": _plain_adam, "sgd": _sgd}


def _adam(config: OptimConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _with_state(
    kind: type,
    parameters: Sequence[TrainedParameter],
    config: OptimConfig,
    on_host: Collection[str],
    **settings: Any,
) -> torch.optim.Optimizer:
    optimizer = kind(decay_groups(parameters, config), lr=config.lr, fused=True, **settings)
    set_learning_rate(optimizer, config.lr, config.weight_decay, config.decoupled_lr)
    dtypes = config.exp_avg_dtype, config.exp_avg_sq_dtype
    for item in parameters:
        if kind is ReducedAdam and optimizer.take(item, dtypes):
            continue
        device = torch.device("cpu") if item.name in on_host else item.parameter.device
        optimizer.state[item.parameter] = _initial_state(
            item.parameter, kind is torch.optim.SGD, config, device
        )
    return optimizer


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Sets this step's learning rates, and the weight decay of the groups that have one."""
    for group in optimizer.param_groups:
        group["lr"] = lr if decoupled_lr is None or not group.get("decoupled") else decoupled_lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _decays(item: TrainedParameter) -> bool:
    *_, module, kind = ["", *item.name.split(".")]
    return item.parameter.dim() > 1 and kind != "bias" and not module.endswith("layernorm")


def _initial_state(
    parameter: Tensor, is_sgd: bool, config: OptimConfig, device: torch.device
) -> dict[str, Tensor]:
    if is_sgd:
        return {"momentum_buffer": torch.zeros_like(parameter, device=device)} if config.sgd_momentum else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, device=device),
        "exp_avg_sq": torch.zeros_like(parameter, device=device),
    }
