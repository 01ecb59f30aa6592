"""The script's optimizer over this rank's shards: its class, its groups in their order, its rates and decays.

The gradients of a call of the model are kept apart until its loss has a backward pass, which says by what they count;
they are then added to those of the step. `EngineOptimizer.step` clips and applies these. Around it, and around the
script's scheduler, stand the wrappers of Accelerate that `prepare` returns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.dialects.accelerate.process_state import on_every_rank
from megalith.errors import ConfigError
from megalith.optim.adam import AdamW
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.offload import OffloadedOptimizer, select_for_offload
from megalith.optim.step import StepResult, optimizer_step, sum_of_squares
from megalith.parallel.data.gradient_norm import GradientSquares
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.tied_parameters import counted_elsewhere, shared_parameters
from megalith.small_files import read_small_file

CLASSES = {torch.optim.AdamW: AdamW, torch.optim.Adam: torch.optim.Adam, torch.optim.SGD: torch.optim.SGD}
# How torch steps, which does not change what it computes; ours is fused, and makes its state at once.
OF_TORCH = ("params", "foreach", "fused", "capturable", "differentiable")
KEPT_APART = ("params", "param_names")


class Gradients:
    """Of each parameter of this rank the gradient of the step so far, or None; float32, times the loss scale."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def take(self) -> list[Tensor | None]:
        """What a backward pass has left in `.grad`, which is not the step's yet."""
        return [parameter.grad for parameter in self._parameters]

    @torch.no_grad()
    def add(self, made: Sequence[Tensor | None], weight: Tensor) -> None:
        """Adds `weight`, a scalar, times gradients that were taken, which are used up."""
        held = [grad for grad in made if grad is not None and grad.numel()]
        if held:
            torch._foreach_mul_(held, weight.to(held[0].device, torch.float32))
        for number, grad in enumerate(made):
            if grad is not None:
                before = self.sums[number]
                self.sums[number] = grad if before is None else before.add_(grad)

    def attach(self) -> None:
        """Puts the step's gradients into `.grad`."""
        for parameter, grad in zip(self._parameters, self.sums):
            parameter.grad = grad

    def clear(self) -> None:
        """Forgets the step's gradients."""
        self.sums = [None] * len(self._parameters)


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer of torch, as scripts and schedulers take it, over this rank's shards of the script's groups.

    `param_groups` are the script's own in their order, so that any scheduler of torch can write to them; on a pipeline
    rank some may have no parameters.
    """

    def __init__(self, model: ParallelModel, given: torch.optim.Optimizer, config: OptimConfig,
                 origins: Mapping[str, list[nn.Parameter]], precision: str):  # fmt: skip
        kind = _known_class(given)
        self.model, self.config, self.defaults = model, config, given.defaults
        named = dict(model.parameters.named)
        of_group = {id(p): n for n, group in enumerate(given.param_groups) for p in group["params"]}
        models = [p for found in origins.values() for p in found]
        self.trained = {id(p) for p in models if id(p) in of_group and p.requires_grad}
        """The ids of the script's own parameters that are stepped, on whatever rank."""
        if not of_group.keys() & {id(p) for p in models}:
            raise ConfigError(
                f"none of the optimizer's {len(of_group)} parameters is one of the model's; "
                "make it of the model that prepare is given: AdamW(model.parameters())"
            )
        if not self.trained:
            raise ConfigError(
                "all of the optimizer's parameters are frozen, so there is nothing to train; set requires_grad before "
                "prepare (merged adapters leave their model frozen: model.requires_grad_(True))"
            )
        groups: list[dict[str, Any]] = [
            {**{name: value for name, value in group.items() if name not in OF_TORCH}, "params": []}
            for group in given.param_groups
        ]
        for name, parameter in named.items():
            number = _group_of(name, origins[name], of_group, given.param_groups)
            if number is not None:
                groups[number]["params"].append((name, parameter))
        for group in groups:
            if not group["params"]:
                group["param_names"] = []
        _fill_names(groups)
        self.inner = _fused(kind, groups)
        host = self._start_state(named)
        if host:
            self.inner = OffloadedOptimizer(self.inner, host, config.overlap_cpu_optimizer_d2h_h2d)
        # What the script keeps of its optimizer is this one: a scheduler that it does not prepare writes to these too.
        given.param_groups, given._opt_called = self.param_groups, True
        given.step, given.zero_grad = self.step, self.zero_grad  # type: ignore[method-assign]
        chunks, mesh = model.chunks, model.mesh
        self.loss_scale = build_loss_scale(precision, config, model.device)
        self.gradient_squares = GradientSquares(
            model.parameters, mesh.world, sum_of_squares, counted_elsewhere(chunks, mesh), model.device
        )
        self.gradients = Gradients([parameter for _, parameter in model.parameters.named])
        self.tallies: Tensor | None = None
        self.is_clipped = False
        self.steps = 0
        self.result: StepResult | None = None

    def _start_state(self, named: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Makes the state; the parameters of which it stands on the host."""
        model, config = self.model, self.config
        on_gpu = [(name, p) for name, p in named.items() if p.device.type != "cpu"]
        share = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        twice = shared_parameters(model.chunks, model.mesh)
        host = select_for_offload(on_gpu, share, twice if share < 1 else ())
        for group in self.inner.param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                where = torch.device("cpu") if name in host else parameter.device
                self.inner.state[parameter] = _state(type(self.inner), group, parameter, where)
        return [p for name, p in on_gpu if name in host]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step."""
        self.gradients.clear()
        self.tallies, self.is_clipped = None, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clips and applies the gradients of the step, and forgets them. Every rank calls it.

        A step whose gradient is not finite changes nothing. Without any gradient there is no step.
        """
        if closure is not None:
            raise ConfigError("the optimizer's step takes no closure; call the model and backward before it")
        if all(grad is None for grad in self.gradients.sums) and not self._somewhere():
            return
        self._opt_called = True
        self.gradients.attach()
        clip = 0.0 if self.is_clipped else self.config.clip_grad
        with on_every_rank("optimizer.step"):
            self.result = optimizer_step(self.inner, self.loss_scale, clip, self._total_squares)
        self.model.tallies = self.tallies
        self.model.end_step(self.result.skipped)
        self.model.parameters.clear_gradients()
        self.steps += 1
        self.zero_grad()

    step._wrapped_by_lr_sched = True  # a scheduler of torch then knows by _opt_called that it was called

    def _somewhere(self) -> bool:
        """A pipeline rank without trained parameters steps with the others."""
        return self.model.mesh.pp.size > 1 and not any(group["params"] for group in self.param_groups)

    def _total_squares(self, parameters: list[Tensor]) -> Tensor:
        squares, amaxes = self.gradient_squares(parameters), self.model.amaxes
        return squares if amaxes is None else squares + amaxes.overflow()

    @torch.no_grad()
    def clip_norm(self, largest: float) -> Tensor:
        """Scales the step's gradients, as torch's clip_grad_norm_ does, in the place of the plugin's clipping; their
        norm before it, the same on every rank. Every rank calls it."""
        self.gradients.attach()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.gradient_squares(trained).sqrt() / self.loss_scale.scale
        held = [grad for grad in self.gradients.sums if grad is not None and grad.numel()]
        if held:
            torch._foreach_mul_(held, (largest / (norm + 1e-6)).clamp(max=1.0))
        self.model.parameters.clear_gradients()
        self.is_clipped = True
        return norm

    @torch.no_grad()
    def clip_value(self, largest: float) -> None:
        """Cuts each element of the step's gradients off at ±`largest`."""
        for grad in self.gradients.sums:
            if grad is not None:
                limit = largest * self.loss_scale.scale
                grad.clamp_(-limit, limit)
        self.is_clipped = True

    @property
    def was_skipped(self) -> bool:
        """Whether the last step changed nothing, for its gradient was not finite. Waits for the device."""
        return self.result is not None and bool(self.result.skipped.item())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError("a prepared optimizer takes no further groups; add them before prepare")

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards, as torch has them: to be loaded in the same layout. `save_state` saves for any."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def save_groups(self, file: Path) -> None:
        """Writes what schedulers and scripts have set of each group."""
        groups = [{k: v for k, v in group.items() if k not in KEPT_APART} for group in self.param_groups]
        file.write_text(json.dumps(groups, default=float, indent=1), encoding="utf-8")

    def load_groups(self, file: Path) -> None:
        """What `save_groups` wrote. Raises ConfigError for another number of groups."""
        groups = json.loads(read_small_file(file, file.parent))
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"{file} has {len(groups)} groups of parameters, but this optimizer {len(self.param_groups)}; make it "
                "with the groups that it was saved with"
            )
        for own, found in zip(self.param_groups, groups):
            own.update({k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in own})


class Pass:
    """The gradients of one call, until its loss has a backward pass."""

    def __init__(self, optimizer: EngineOptimizer, made: list[Tensor | None], tallies: Tensor | None):
        self._optimizer, self._made, self._tallies = optimizer, made, tallies

    def count(self, weight: Tensor) -> None:
        """They are the step's, `weight` times. Raises ConfigError the second time."""
        if self._made is None:
            raise ConfigError(
                "this loss has had its backward pass, whose gradients are used up; call the model again for another"
            )
        optimizer = self._optimizer
        optimizer.gradients.add(self._made, weight)
        if self._tallies is not None:
            before = optimizer.tallies
            optimizer.tallies = self._tallies if before is None else before + self._tallies
        self._made = None


class PassLoss(torch.autograd.Function):
    """The loss of a call, whose gradients are made: a backward pass says how often they count."""

    @staticmethod
    def forward(ctx, anchor: Tensor, value: Tensor, made: Pass) -> Tensor:
        ctx.made = made
        return value.clone()

    @staticmethod
    def backward(ctx, weight: Tensor):
        ctx.made.count(weight)
        return None, None, None


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The prepared optimizer: it steps, and forgets its gradients, where `accumulate` says that a step is whole."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, for its gradient was not finite."""
        return self.optimizer.was_skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """The prepared scheduler: a step of the optimizer is one of its own, on however many processes."""

    def __init__(self, scheduler: Any, optimizers: Any, fp16: bool = False, step_with_optimizer: bool = True):
        """`fp16`: steps are skipped while the loss scale is sought, and the rate waits for them."""
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self._waits = fp16

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Moves on, where `accumulate` says that a step is whole."""
        if not self.step_with_optimizer or (
            self.gradient_state.sync_gradients
            and not (self._waits and any(o.step_was_skipped for o in self.optimizers))
        ):
            self.scheduler.step(*args, **kwargs)


def _known_class(given: torch.optim.Optimizer) -> type:
    names = ", ".join(f"torch.optim.{kind.__name__}" for kind in CLASSES)
    if type(given) not in CLASSES:
        raise ConfigError(
            f"prepare was given an optimizer {type(given).__name__}; shards and fp16's scale are stepped by {names}: "
            "use one of these"
        )
    for group in given.param_groups:
        unheard = {"amsgrad": group.get("amsgrad"), "dampening": group.get("dampening")}
        for name in (name for name, value in unheard.items() if value):
            raise ConfigError(
                f"the optimizer's {name} is {unheard[name]}, which this version does not have; leave it out"
            )
    if given.state:
        raise ConfigError(
            "the optimizer has state already; prepare it before its first step, and use load_state"
        )
    return CLASSES[type(given)]


def _group_of(
    name: str, made_of: list[nn.Parameter], of_group: dict[int, int], groups: list[dict]
) -> int | None:
    """The number of a tensor's group; None where it is frozen or in none."""
    numbers = [of_group.get(id(parameter)) if parameter.requires_grad else None for parameter in made_of]
    settings = [
        None if n is None else {k: v for k, v in groups[n].items() if k not in ("params", "param_names")}
        for n in numbers
    ]
    if any(one != settings[0] for one in settings):
        told = [f"group {n}" if n is not None else "none" for n in dict.fromkeys(numbers)]
        raise ConfigError(
            f"the parameters that {name} is made of stand in {' and '.join(told)} of the optimizer's groups, with "
            "other rates or decays, but they are one tensor here; put them in one group"
        )
    return numbers[0] if numbers else None


def _fill_names(groups: list[dict[str, Any]]) -> None:
    """Takes names and parameters apart, for torch takes the names of all groups or of none."""
    for group in groups:
        pairs = group["params"]
        group["param_names"] = [name for name, _ in pairs]
        group["params"] = [parameter for _, parameter in pairs]


def _fused(kind: type, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over groups with `param_names`, some or all of which may be empty."""
    names = [group.pop("param_names") for group in groups]
    optimizer = kind(groups, lr=groups[0]["lr"], fused=True)
    for group, own in zip(optimizer.param_groups, names):
        group["param_names"] = own
    return optimizer


def _state(
    kind: type, group: dict[str, Any], parameter: nn.Parameter, device: torch.device
) -> dict[str, Tensor]:
    if kind is torch.optim.SGD:
        return {"momentum_buffer": torch.zeros_like(parameter, device=device)} if group["momentum"] else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, device=device),
        "exp_avg_sq": torch.zeros_like(parameter, device=device),
    }
