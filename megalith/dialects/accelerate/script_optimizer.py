"""The script's optimizer over this rank's shards, with its class, parameter groups, learning rates and weight decays.

The gradients of a model call are kept separately until the backward pass of its loss, which determines their factor;
they are then added to the step's gradients. `EngineOptimizer.step` clips and applies the step's gradients. `prepare`
returns Accelerate's wrappers around the optimizer and the scheduler.
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

from megalith.compat.training_objects import mark_counting_step, mark_stepped
from megalith.config import OptimConfig
from megalith.dialects.accelerate.process_state import collective_call
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
# Options that select torch's implementation, not the result; the optimizers here are always fused.
IMPLEMENTATION_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable")
PARAMETER_KEYS = ("params", "param_names")


class StepGradients:
    """A step's accumulated gradients times the loss scale: a float32 tensor per local parameter, or None."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def take(self) -> list[Tensor | None]:
        """Return the gradients that a backward pass left in `.grad`, None where it left none."""
        return [parameter.grad for parameter in self._parameters]

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], weight: Tensor) -> None:
        """Add `weight` · `gradients` to the step's gradients. `weight` is a scalar; the `gradients` are overwritten."""
        nonempty = [grad for grad in gradients if grad is not None and grad.numel()]
        if nonempty:
            torch._foreach_mul_(nonempty, weight.to(nonempty[0].device, torch.float32))
        for index, grad in enumerate(gradients):
            if grad is not None:
                before = self.sums[index]
                self.sums[index] = grad if before is None else before.add_(grad)

    def attach(self) -> None:
        """Set `.grad` to the step's gradients."""
        for parameter, grad in zip(self._parameters, self.sums):
            parameter.grad = grad

    def clear(self) -> None:
        """Drop the step's gradients."""
        self.sums = [None] * len(self._parameters)


class EngineOptimizer(torch.optim.Optimizer):
    """A torch optimizer, for scripts and schedulers, over this rank's shards of the script's parameter groups.

    `param_groups` keep the script's order, so any torch scheduler can update them. On pipeline ranks some may be empty.
    """

    def __init__(self, model: ParallelModel, script_optimizer: torch.optim.Optimizer, config: OptimConfig,
                 source_parameters: Mapping[str, list[nn.Parameter]], precision: str):  # fmt: skip
        """Take over the script's optimizer.

        Args:
            model: the sharded model.
            script_optimizer: optimizer without state; its step and zero_grad are redirected to this one.
            config: clipping and offload settings.
            source_parameters: the script's parameters by Megalith's tensor name.
            precision: fp32, bf16 or fp16.

        Raises:
            ConfigError: unsupported optimizer, or no trainable parameter of the model.
        """
        kind = _engine_class(script_optimizer)
        self.model, self.config, self.defaults = model, config, script_optimizer.defaults
        local_parameters = dict(model.parameters.named)
        group_of_id = {
            id(p): index for index, group in enumerate(script_optimizer.param_groups) for p in group["params"]
        }
        model_parameters = [p for parameters in source_parameters.values() for p in parameters]
        self.trained = {id(p) for p in model_parameters if id(p) in group_of_id and p.requires_grad}
        """Ids of the script's parameters that are trained, on any rank."""
        if not group_of_id.keys() & {id(p) for p in model_parameters}:
            raise ConfigError(
                f"none of the optimizer's {len(group_of_id)} parameters belongs to the model; create the optimizer "
                "with the parameters of the model that you pass to prepare: AdamW(model.parameters())"
            )
        if not self.trained:
            raise ConfigError(
                "all of the optimizer's parameters are frozen; call model.requires_grad_(True) before prepare "
                "(merging adapters leaves a model frozen)"
            )
        groups: list[dict[str, Any]] = [
            {
                **{name: value for name, value in group.items() if name not in IMPLEMENTATION_OPTIONS},
                "params": [],
            }
            for group in script_optimizer.param_groups
        ]
        for name, parameter in local_parameters.items():
            index = _group_of(name, source_parameters[name], group_of_id, script_optimizer.param_groups)
            if index is not None:
                groups[index]["params"].append((name, parameter))
        for group in groups:
            if not group["params"]:
                group["param_names"] = []
        _split_names(groups)
        self.inner = _build_fused(kind, groups)
        offloaded = self._init_state(local_parameters)
        if offloaded:
            self.inner = OffloadedOptimizer(self.inner, offloaded, config.overlap_cpu_optimizer_d2h_h2d)
        # The script's optimizer shares these groups, for schedulers that the script does not prepare.
        script_optimizer.param_groups = self.param_groups
        mark_stepped(script_optimizer)
        script_optimizer.step, script_optimizer.zero_grad = self.step, self.zero_grad  # type: ignore[method-assign]
        chunks, mesh = model.chunks, model.mesh
        self.loss_scale = build_loss_scale(precision, config, model.device)
        self.gradient_squares = GradientSquares(
            model.parameters, mesh.world, sum_of_squares, counted_elsewhere(chunks, mesh), model.device
        )
        self.gradients = StepGradients([parameter for _, parameter in model.parameters.named])
        self.tallies: Tensor | None = None
        self.is_clipped = False
        self.steps = 0
        self.result: StepResult | None = None

    def _init_state(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """Create the optimizer state. Return the parameters whose state is offloaded to the host."""
        model, config = self.model, self.config
        on_gpu = [(name, p) for name, p in parameters.items() if p.device.type != "cpu"]
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        tied = shared_parameters(model.chunks, model.mesh)
        offloaded = select_for_offload(on_gpu, fraction, tied if fraction < 1 else ())
        for group in self.inner.param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                device = torch.device("cpu") if name in offloaded else parameter.device
                self.inner.state[parameter] = _initial_state(type(self.inner), group, parameter, device)
        return [p for name, p in on_gpu if name in offloaded]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the step."""
        self.gradients.clear()
        self.tallies, self.is_clipped = None, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip and apply the gradients of the step, then clear them. Collective over all ranks.

        A step with a non-finite gradient changes nothing. Without gradients nothing happens.
        """
        if closure is not None:
            raise ConfigError(
                "the optimizer's step does not support a closure; call the model and backward first"
            )
        if all(grad is None for grad in self.gradients.sums) and not self._steps_without_parameters():
            return
        self._opt_called = True
        self.gradients.attach()
        clip = 0.0 if self.is_clipped else self.config.clip_grad
        with collective_call("optimizer.step"):
            self.result = optimizer_step(self.inner, self.loss_scale, clip, self._total_squares)
        self.model.clip_attention(self.config, self.result.skipped)
        self.model.tallies = self.tallies
        self.model.end_step(self.result.skipped)
        self.model.parameters.clear_gradients()
        self.steps += 1
        self.zero_grad()

    mark_counting_step(step)

    def _steps_without_parameters(self) -> bool:
        """Return True if this pipeline rank has no trained parameters but must step with the others."""
        return self.model.mesh.pp.size > 1 and not any(group["params"] for group in self.param_groups)

    def _total_squares(self, parameters: list[Tensor]) -> Tensor:
        squares, amaxes = self.gradient_squares(parameters), self.model.amaxes
        return squares if amaxes is None else squares + amaxes.overflow()

    @torch.no_grad()
    def clip_norm(self, max_norm: float) -> Tensor:
        """Scale the step's gradients as torch's clip_grad_norm_ does; replaces the plugin's clipping.

        Collective over all ranks. Returns the global norm before clipping, equal on every rank.
        """
        self.gradients.attach()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.gradient_squares(trained).sqrt() / self.loss_scale.scale
        nonempty = [grad for grad in self.gradients.sums if grad is not None and grad.numel()]
        if nonempty:
            torch._foreach_mul_(nonempty, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.model.parameters.clear_gradients()
        self.is_clipped = True
        return norm

    @torch.no_grad()
    def clip_value(self, clip_value: float) -> None:
        """Clamp each element of the step's gradients to ±`clip_value`."""
        for grad in self.gradients.sums:
            if grad is not None:
                limit = clip_value * self.loss_scale.scale
                grad.clamp_(-limit, limit)
        self.is_clipped = True

    @property
    def was_skipped(self) -> bool:
        """True if the last step was skipped because of a non-finite gradient. Synchronizes with the device."""
        return self.result is not None and bool(self.result.skipped.item())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError("parameter groups cannot be added to a prepared optimizer; add them before prepare")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards in torch's format, for the same layout only. `save_state` saves for any layout."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def save_groups(self, file: Path) -> None:
        """Write the options of each parameter group."""
        groups = [{k: v for k, v in group.items() if k not in PARAMETER_KEYS} for group in self.param_groups]
        file.write_text(json.dumps(groups, default=float, indent=1), encoding="utf-8")

    def load_groups(self, file: Path) -> None:
        """Load what `save_groups` wrote. Raises ConfigError if the number of groups differs."""
        groups = json.loads(read_small_file(file, file.parent))
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"{file} has {len(groups)} parameter groups, but this optimizer has {len(self.param_groups)}; create "
                "the optimizer with the groups that it was saved with"
            )
        for group, saved in zip(self.param_groups, groups):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in group})


class CallGradients:
    """The gradients of one model call, until the backward pass of its loss."""

    def __init__(self, optimizer: EngineOptimizer, gradients: list[Tensor | None], tallies: Tensor | None):
        self._optimizer, self._gradients, self._tallies = optimizer, gradients, tallies

    def accumulate(self, weight: Tensor) -> None:
        """Add this loss's gradients, times `weight`, to the step's gradients. Raises ConfigError if called twice."""
        if self._gradients is None:
            raise ConfigError(
                "backward was already called on this loss, and its gradients were used; call the model again for a "
                "new loss"
            )
        optimizer = self._optimizer
        optimizer.gradients.add(self._gradients, weight)
        if self._tallies is not None:
            before = optimizer.tallies
            optimizer.tallies = self._tallies if before is None else before + self._tallies
        self._gradients = None


class CallLoss(torch.autograd.Function):
    """The loss of a model call. Its backward pass adds the call's gradients to the step's gradients."""

    @staticmethod
    def forward(ctx, anchor: Tensor, value: Tensor, gradients: CallGradients) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, weight: Tensor):
        ctx.gradients.accumulate(weight)
        return None, None, None


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The prepared optimizer. It steps and clears its gradients only when `accumulate` completes a step."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because of a non-finite gradient."""
        return self.optimizer.was_skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """The prepared scheduler. It advances once per optimizer step, regardless of the number of processes."""

    def __init__(self, scheduler: Any, optimizers: Any, fp16: bool = False, step_with_optimizer: bool = True):
        """Wrap the script's scheduler.

        With `fp16`, the scheduler does not step when the optimizer skips its step, as at the start of fp16 training.
        """
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self._follows_skips = fp16

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler when `accumulate` completes a step."""
        if not self.step_with_optimizer or (
            self.gradient_state.sync_gradients
            and not (self._follows_skips and any(o.step_was_skipped for o in self.optimizers))
        ):
            self.scheduler.step(*args, **kwargs)


def _engine_class(optimizer: torch.optim.Optimizer) -> type:
    """Return the class that trains shards like the script's optimizer. Raises ConfigError if there is none."""
    names = ", ".join(f"torch.optim.{kind.__name__}" for kind in CLASSES)
    if type(optimizer) not in CLASSES:
        raise ConfigError(
            f"prepare was called with the optimizer {type(optimizer).__name__}, which cannot train sharded "
            f"parameters; use one of {names}"
        )
    for group in optimizer.param_groups:
        unsupported = {"amsgrad": group.get("amsgrad"), "dampening": group.get("dampening")}
        for name in (name for name, value in unsupported.items() if value):
            raise ConfigError(
                f"the optimizer's {name} is {unsupported[name]}, which is not supported; leave {name} out"
            )
    if optimizer.state:
        raise ConfigError(
            "the optimizer already has state from earlier steps, which prepare cannot shard; prepare it before its "
            "first step, and restore state with load_state"
        )
    return CLASSES[type(optimizer)]


def _group_of(
    name: str, sources: list[nn.Parameter], group_of_id: dict[int, int], groups: list[dict]
) -> int | None:
    """Return the index of a tensor's parameter group, or None if it is frozen or in no group."""
    indices = [group_of_id.get(id(parameter)) if parameter.requires_grad else None for parameter in sources]
    options = [
        None if n is None else {k: v for k, v in groups[n].items() if k not in PARAMETER_KEYS}
        for n in indices
    ]
    if any(other != options[0] for other in options):
        labels = [f"group {n}" if n is not None else "no group" for n in dict.fromkeys(indices)]
        raise ConfigError(
            f"{' and '.join(labels)} of the optimizer have different learning rates or weight decays, but "
            f"Megalith stores the parameters of {name} in one tensor; put them in one group"
        )
    return indices[0] if indices else None


def _split_names(groups: list[dict[str, Any]]) -> None:
    """Split (name, parameter) pairs into two lists, because torch requires names in all groups or in none."""
    for group in groups:
        pairs = group["params"]
        group["param_names"] = [name for name, _ in pairs]
        group["params"] = [parameter for _, parameter in pairs]


def _build_fused(kind: type, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build a fused optimizer for groups with `param_names`. Groups may be empty."""
    names = [group.pop("param_names") for group in groups]
    optimizer = kind(groups, lr=groups[0]["lr"], fused=True)
    for group, group_names in zip(optimizer.param_groups, names):
        group["param_names"] = group_names
    return optimizer


def _initial_state(
    kind: type, group: dict[str, Any], parameter: nn.Parameter, device: torch.device
) -> dict[str, Tensor]:
    if kind is torch.optim.SGD:
        return {"momentum_buffer": torch.zeros_like(parameter, device=device)} if group["momentum"] else {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, device=device),
        "exp_avg_sq": torch.zeros_like(parameter, device=device),
    }
