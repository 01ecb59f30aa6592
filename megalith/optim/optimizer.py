"""PyTorch's fused optimizers over fp32 parameters, with Megatron's weight-decay groups.

Every parameter is fp32 and is its own master weight: the model casts to the compute type where it uses one,
so gradients arrive in fp32 and nothing is kept twice. Parameters go in with their names, and each group
carries them (`param_names`), so that a checkpoint can store the state of a parameter under its name.

The state is created here and not at the first step, for three reasons: a checkpoint loads into it in place,
its memory is known before training starts, and a first step that is skipped for a non-finite gradient leaves
it at zero (torch's fused SGD would leave its momentum uninitialised and use it). A share of it can be in the host's
memory (offload.py).

torch's AdamW with the large parameters of a GPU stepped by a kernel of our own: see ops/kernels/adam_kernel.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from megalith.config import OptimConfig
from megalith.errors import ConfigError
from megalith.ops import kernels as fused
from megalith.optim.offload import OffloadedOptimizer, kept_on_host


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    held_elsewhere: Collection[str] = (),
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay), Adam (decay added to the gradient) or SGD with momentum, fused, state at zero.

    Weight decay applies to matrices, not to biases and 1-D parameters. Frozen parameters are left out.
    Parameters may be local shards; their names are kept in each group's `param_names`. With `optimizer_cpu_offload`
    the state of a share of the parameters on a GPU is made in the host's memory. Unless it is all, parameters that are
    `held_elsewhere` too are not among them: a rank with others beside them would choose otherwise, and copies that a
    CPU and a GPU step drift apart.
    Raises ConfigError when `lr` is not set or a parameter that is to be trained is not fp32.
    """
    if config.lr is None:
        raise ConfigError("optim.lr is not set; training needs the highest learning rate, for example 3e-4")
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; trained parameters are fp32 in every precision: "
                "call model.float() and set train.precision for the compute type"
            )
    by_kind: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trained:
        decoupled = config.decoupled_lr is not None and name in ENDS
        by_kind.setdefault((not _decays(name, parameter), decoupled), []).append((name, parameter))
    groups = [
        {"params": items, "decays": not plain, "decoupled": decoupled}
        for (plain, decoupled), items in sorted(by_kind.items(), key=lambda kind: kind[0])
    ]
    nothing = {
        "params": [],
        "param_names": [],
        "decays": False,
        "decoupled": False,
    }  # a pipeline rank's, maybe
    groups = groups or [nothing]
    adam = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    match config.optimizer:
        case "adamw":
            optimizer = AdamW(groups, lr=config.lr, fused=True, **adam)
        case "adam":
            optimizer = torch.optim.Adam(groups, lr=config.lr, fused=True, **adam)
        case "sgd":
            optimizer = torch.optim.SGD(groups, lr=config.lr, fused=True, momentum=config.sgd_momentum)
    set_learning_rate(optimizer, config.lr, config.weight_decay, config.decoupled_lr)
    on_gpu = [(name, parameter) for name, parameter in trained if parameter.device.type != "cpu"]
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    names = kept_on_host(on_gpu, fraction, held_elsewhere if fraction < 1 else ())
    on_host = [parameter for name, parameter in on_gpu if name in names]
    for name, parameter in trained:
        device = torch.device("cpu") if name in names else parameter.device
        optimizer.state[parameter] = _initial_state(parameter, config, device)
    if not on_host:
        return optimizer
    return OffloadedOptimizer(optimizer, on_host, config.overlap_cpu_optimizer_d2h_h2d)


ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")  # that have decoupled_lr where it is set


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Sets this step's learning rates, and the weight decay of the groups that have one."""
    for group in optimizer.param_groups:
        group["lr"] = lr if decoupled_lr is None or not group["decoupled"] else decoupled_lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and name.rpartition(".")[2] != "bias"


def _initial_state(parameter: Tensor, config: OptimConfig, device: torch.device) -> dict[str, Tensor]:
    if config.optimizer == "sgd":
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
