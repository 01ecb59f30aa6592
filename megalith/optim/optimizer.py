"""PyTorch's fused optimizers over fp32 parameters, with Megatron's weight-decay groups.

Every parameter is fp32 and is its own master weight: the model casts to the compute type where it uses one,
so gradients arrive in fp32 and nothing is kept twice. Parameters go in with their names, and each group
carries them (`param_names`), so that a checkpoint can store the state of a parameter under its name.

The state is created here and not at the first step, for three reasons: a checkpoint loads into it in place,
its memory is known before training starts, and a first step that is skipped for a non-finite gradient leaves
it at zero (torch's fused SGD would leave its momentum uninitialised and use it). A share of it can be in the host's
memory (offload.py).

torch's AdamW with the large parameters of a GPU stepped by a kernel of our own: see ops/kernels/adam_kernel.py.

Muon (Jordan et al. 2024): momentum made orthogonal, for the matrices of the layers; AdamW for everything else.

The update of a matrix is its momentum, Nesterov's, with all singular values brought near 1, by five steps of a quintic
Newton-Schulz iteration that needs matmuls alone. That is a function of the whole matrix. So each rank gathers the
shards of a matrix's momentum over the axes that its placement names, makes the whole orthogonal, and keeps its own
shard of that: one matrix at a time. What a fused weight holds side by side (query, key and value; gate and up) is
several matrices, and each is made orthogonal by itself, as is each expert's.

The update is scaled by its matrix's shape (`muon_scale_mode`). By default its RMS is about that of AdamW's, so that one
learning rate and one weight decay serve both (Liu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.errors import ConfigError, nearest_of
from megalith.ops import kernels as fused
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


LEAST = 2**18  # elements; below, torch steps many parameters with one launch


class AdamW(torch.optim.AdamW):
    """Fused. It is stepped by `optimizer_step`, which sets `grad_scale` and `found_inf`."""

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient. Gradients of large ones are left as they were."""
        large = [
            (group, p, p.grad) for group in self.param_groups for p in group["params"] if self._is_large(p)
        ]
        for _, parameter, _ in large:
            parameter.grad = None  # which torch takes as: not to be stepped
        super().step()
        steps = [self.state[parameter]["step"] for _, parameter, _ in large]
        if steps:
            # A list: the value of a single tensor would be read on the host.
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        for (group, parameter, grad), step in zip(large, steps):
            parameter.grad = grad
            state = self.state[parameter]
            fused.adamw_(
                parameter, grad, state["exp_avg"], state["exp_avg_sq"], step, self.grad_scale, self.found_inf,
                group["lr"], group["betas"], group["eps"], group["weight_decay"],
            )  # fmt: skip

    def _is_large(self, parameter: nn.Parameter) -> bool:
        grad = parameter.grad
        if grad is None or not (fused.AVAILABLE and parameter.is_cuda) or parameter.numel() < LEAST:
            return False
        return parameter.is_contiguous() and grad.is_contiguous()


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

SCALES = {  # of a matrix [rows, columns], by muon_scale_mode
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def orthogonalized(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """U · Vᵀ of each matrix U · S · Vᵀ of x [..., rows, columns], but for singular values between about 0.7 and 1.2.
    Computed in `dtype`."""
    a, b, c = COEFFICIENTS
    wide = x.shape[-2] <= x.shape[-1]
    y = x.to(dtype) if wide else x.to(dtype).mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if wide else y.mT


class Muon(torch.optim.Optimizer):
    """It is stepped by `optimizer_step`, which sets `grad_scale` and `found_inf`. Every rank steps together."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        matrices: Sequence[TrainedParameter],
        others: torch.optim.Optimizer | None,
        config: OptimConfig,
        dtype: torch.dtype,
    ):
        """`matrices` have a `placement.matrices`; `others` steps the rest. `dtype` is Newton-Schulz's."""
        groups = [group | {"is_muon": True} for group in decay_groups(matrices, config)]
        super().__init__(groups + (others.param_groups if others else []), {"lr": config.lr})
        self._others, self._config, self._dtype = others, config, dtype
        if others is not None:
            self.state = others.state
        self._placements = {item.parameter: item.placement for item in matrices}
        for item in matrices:
            self.state[item.parameter] = {"momentum_buffer": torch.zeros_like(item.parameter)}

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient."""
        if self._others is not None:
            self._others.grad_scale, self._others.found_inf = self.grad_scale, self.found_inf
            self._others.step()
        for group in self.param_groups:
            for parameter in group["params"] if group.get("is_muon") else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)

    def _step_matrix(self, parameter: Tensor, group: Mapping) -> None:
        momentum, buffer = self._config.muon_momentum, self.state[parameter]["momentum_buffer"]
        gradient = parameter.grad / self.grad_scale
        moved = buffer.lerp(gradient, 1 - momentum)
        update = gradient.lerp(moved, momentum) if self._config.muon_nesterov else moved
        placement = self._placements[parameter]
        update = placement.own(self._orthogonalized_parts(placement.whole(update), placement.matrices))
        stepped = parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        keep = self.found_inf > 0  # decided on the device: the host waits for nothing
        parameter.copy_(torch.where(keep, parameter, stepped))
        buffer.copy_(torch.where(keep, buffer, moved))

    def _orthogonalized_parts(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of whole [..., rows, columns], whose rows alternate between matrices of `sizes` rows at a time."""
        config, results = self._config, []
        blocks = whole.unflatten(-2, (-1, sum(sizes)))
        for part in blocks.split(list(sizes), dim=-2):
            matrix = part.flatten(-3, -2)
            factor = config.muon_extra_scale_factor * SCALES[config.muon_scale_mode](*matrix.shape[-2:])
            made = orthogonalized(matrix, config.muon_num_ns_steps, self._dtype).float() * factor
            results.append(made.unflatten(-2, part.shape[-3:-1]))
        return torch.cat(results, dim=-2).flatten(-3, -2)


def build_muon(parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str) -> Muon:
    """Muon for the parameters that are matrices of layers, AdamW for the others, with their state at zero."""
    matrices = [item for item in parameters if item.placement.matrices is not None]
    rest = [item for item in parameters if item.placement.matrices is None]
    if config.muon_fp32_matmul_prec is not None:
        exact = config.muon_fp32_matmul_prec == "highest"
    else:
        exact = precision == "fp32"
    return Muon(
        matrices, adamw(rest, config) if rest else None, config, torch.float32 if exact else torch.bfloat16
    )


_REGISTERED["muon"] = build_muon
