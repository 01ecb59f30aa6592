"""SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's preconditioner, for the matrices of layers.

For a matrix W [rows, columns] with gradient G:

     L, R    = averages of G · Gᵀ and Gᵀ · G with soap_shampoo_beta
     U, V    = eigenvectors of L and R, by decreasing eigenvalue
     m, v    = Adam's moments of Uᵀ · G · V
     W       = W - lr · U · (m / (√v + eps)) · Vᵀ, with Adam's bias correction

The first step only sets the bases. Every `soap_precondition_frequency` steps, a power iteration and a QR decomposition
update the bases to follow L and R. This is the algorithm of the authors' code. `soap_use_kl_shampoo` selects that of
Megatron-LM (emerging-optimizers 0.4): L and R are the averages of KL-Shampoo (Lin et al. 2025), and every step,
including the first, updates the bases and then the weights.

The update depends on the whole matrix. One of the ranks that shard a matrix owns it and keeps its state. The other
ranks send their shards of the gradient to the owner and receive their shards of the update. AdamW updates the other
parameters. Fused weights are treated as one matrix, because rotations do not depend on the order of rows.

Eigenvectors amplify rounding. Decompositions therefore run in fp64, and directions that the gradients do not determine,
in the null space of L or R, are chosen by a fixed rule instead of by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.combined import combine
from megalith.optim.optimizer import (
    TrainedParameter,
    build_named,
    decay_groups,
    register_optimizer,
    state_bytes_of,
)
from megalith.optim.rounds import is_shared, rounds_of

NULL = 1e-11
"""Eigenvalues up to this multiple of the largest one count as zero, because they may be rounding errors of fp64."""
TIE_BREAK = 1e-6
"""Size of the diagonal that determines a null space's basis, relative to the mean eigenvalue."""
RESOLUTION = 1e-6
"""Eigenvalues below this multiple of their mean are lost in the rounding of fp32 averages."""
LEFT, RIGHT = "soap_left", "soap_right"
STATE_BYTES = 32
"""Bytes of state per parameter for matrices whose sides differ by a factor of two to three. Square matrices need 24."""


class SOAP(torch.optim.Optimizer):
    """SOAP for matrices. `step` is a collective call; it gets gradients that are finite and divided by the loss scale.

    A parameter's state, apart from `step`, is on the owner of its matrix: Adam's moments in the bases, and for each of
    rows and columns, if there are at most `soap_max_precond_dim`, the average and its basis.
    """

    def __init__(self, matrices: Sequence[TrainedParameter], config: OptimConfig):
        """Build SOAP for `matrices`, which have `placement.matrices`, with state at zero."""
        super().__init__(decay_groups(matrices, config), {"lr": config.lr})
        self.config = config
        self._items = {item.parameter: item for item in matrices}
        shared = [item for item in matrices if is_shared(item)]
        self._rounds = rounds_of(shared)
        for item in matrices:
            self.state[item.parameter]["step"] = torch.zeros(
                (), dtype=torch.float32
            )  # on the host, as it decides
            if item.parameter.numel() and not is_shared(item):
                self._add_state(item, item.parameter.shape)
        for parameters in self._rounds:
            items = [self._items[parameter] for parameter in parameters]
            shards = [item.placement.shared for item in items]
            for position in items[0].placement.owned(shards, [_cost(item) for item in items]):
                item = items[position]
                self._add_state(item, (*item.parameter.shape[:-2], *item.placement.shape[-2:]))

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for parameter, group in groups.items():
            if parameter.grad is not None and parameter.numel() and not is_shared(self._items[parameter]):
                update = self._update(parameter, parameter.grad, group)
                self._apply(parameter, update, group)
        collected = self._collect(self._rounds[0]) if self._rounds else None
        for number, parameters in enumerate(self._rounds):
            current = collected
            following = self._rounds[number + 1 : number + 2]
            collected = self._collect(following[0]) if following else None
            updates = {
                position: self._update(parameters[position], gradient, groups[parameters[position]])
                if parameters[position].grad is not None
                else torch.zeros_like(gradient)
                for position, gradient in current.wait().items()
            }
            for parameter, update in zip(parameters, current.scatter(updates), strict=True):
                if parameter.grad is not None:
                    self._apply(parameter, update, groups[parameter])

    def _collect(self, parameters: Sequence[torch.nn.Parameter]) -> Any:
        """Send the gradients of a round to the owners of the matrices. A matrix has the same owner in every step."""
        items = [self._items[parameter] for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        shards = [item.placement.shared for item in items]
        return items[0].placement.collect(shards, gradients, [_cost(item) for item in items])

    def _add_state(self, item: TrainedParameter, shape: Sequence[int]) -> None:
        """Create the state of matrices [..., rows, columns]: zeros, and identities as bases."""
        device, config, state = item.parameter.device, self.config, self.state[item.parameter]
        for key in ("soap_exp_avg", "soap_exp_avg_sq"):
            state[key] = torch.zeros(shape, device=device)
        for key, size in ((LEFT, shape[-2]), (RIGHT, shape[-1])):
            if config.soap_max_precond_dim is not None and size > config.soap_max_precond_dim:
                continue
            square = (*shape[:-2], size, size)
            state[key] = torch.zeros(square, device=device)
            state[f"{key}_basis"] = torch.eye(size, device=device).expand(square).clone()
            if config.soap_use_kl_shampoo:
                state[f"{key}_values"] = torch.zeros(square[:-1], device=device)

    def _apply(self, parameter: torch.nn.Parameter, update: Tensor, group: Mapping[str, Any]) -> None:
        """Subtract this rank's shard of the update from the parameter, and count the step."""
        decayed, step = 1 - group["lr"] * group["weight_decay"], self.state[parameter]["step"]
        step += 1
        if self.config.soap_use_kl_shampoo:
            parameter.mul_(decayed).sub_(group["lr"] * update)
        elif step > 1:  # the first one only sets the bases
            parameter.sub_(group["lr"] * update).mul_(decayed)

    def _update(self, parameter: torch.nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the update of matrices [..., rows, columns], and change their state."""
        state = self.state[parameter]
        run = self._kl_update if self.config.soap_use_kl_shampoo else self._authors_update
        return run(gradient.float(), state, group["eps"])

    def _authors_update(self, gradient: Tensor, state: dict[str, Tensor], eps: float) -> Tensor:
        """Return the update of the authors' code."""
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        step = int(state["step"].item())  # earlier ones
        if step == 0:
            self._average(gradient, state)
            for key, matrix in _grams(gradient.double(), state).items():
                state[f"{key}_basis"].copy_(_eigenvectors(matrix)[1])
            return torch.zeros_like(gradient)
        rotated = _rotate(gradient, state)
        first = state["soap_exp_avg"].lerp_(rotated, 1 - beta1)
        second = state["soap_exp_avg_sq"].lerp_(rotated.square(), 1 - beta2)
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        update = _rotate_back(correction * first / (second.sqrt() + eps), state)
        self._average(gradient, state)
        if step % self.config.soap_precondition_frequency == 0:
            original = _rotate_back(first, state)
            for dim, key in ((-2, LEFT), (-1, RIGHT)):
                if key in state:
                    basis, order = _power_iteration(state[key].double(), state[f"{key}_basis"].double())
                    state[f"{key}_basis"].copy_(basis)
                    index = order[..., :, None] if dim == -2 else order[..., None, :]
                    second.copy_(second.gather(dim, index.expand(second.shape)))
            first.copy_(_rotate(original, state))
        return update

    def _average(self, gradient: Tensor, state: dict[str, Tensor]) -> None:
        """Update the averages of G · Gᵀ and Gᵀ · G."""
        for key, matrix in _grams(gradient, state).items():
            state[key].lerp_(matrix, 1 - self.config.soap_shampoo_beta)

    def _kl_update(self, gradient: Tensor, state: dict[str, Tensor], eps: float) -> Tensor:
        """Return the update of Megatron-LM's SOAP."""
        beta1, beta2, beta = self.config.adam_beta1, self.config.adam_beta2, self.config.soap_shampoo_beta
        step = 1 + int(state["step"].item())
        original = _rotate_back(state["soap_exp_avg"], state)
        whitened = {LEFT: gradient.double(), RIGHT: gradient.double().mT}
        for key, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
            if other in state:
                whitened[key] = _whitened(whitened[key], state, other, eps)
        weight = (1 - beta) / (1 - beta**step)
        for key, x in whitened.items():
            if key in state:
                average = state[key].double().lerp(x @ x.mT, weight)
                state[key].copy_(average)
                basis = state[f"{key}_basis"].double()
                values, basis = _eigenvectors(average) if step == 1 else _iterated(average, basis)
                state[f"{key}_basis"].copy_(basis)
                state[f"{key}_values"].copy_(values)
        rotated = _rotate(gradient, state)
        if step == 1 and LEFT in state and RIGHT in state:
            # These bases are G's own singular vectors. Adam would scale the rounding off the diagonal up to 1.
            rotated = rotated * torch.eye(*rotated.shape[-2:], device=rotated.device)
        first = state["soap_exp_avg"].copy_(_rotate(original, state)).lerp_(rotated, 1 - beta1)
        second = state["soap_exp_avg_sq"].lerp_(rotated.square(), 1 - beta2)
        root = (second / (1 - beta2**step)).sqrt() + eps
        return _rotate_back(first / (1 - beta1**step) / root, state)


def _rotate(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return Uᵀ · x · V."""
    if LEFT in state:
        x = state[f"{LEFT}_basis"].mT @ x
    return x @ state[f"{RIGHT}_basis"] if RIGHT in state else x


def _rotate_back(x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return U · x · Vᵀ."""
    if LEFT in state:
        x = state[f"{LEFT}_basis"] @ x
    return x @ state[f"{RIGHT}_basis"].mT if RIGHT in state else x


def _grams(gradient: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return G · Gᵀ and Gᵀ · G, but only the products whose averages are in the state."""
    both = {LEFT: (gradient, gradient.mT), RIGHT: (gradient.mT, gradient)}
    return {key: a @ b for key, (a, b) in both.items() if key in state}


def _whitened(x: Tensor, state: Mapping[str, Tensor], key: str, eps: float) -> Tensor:
    """Return x · Q · Λ^(-1/2) / √size for the basis Q and the eigenvalues Λ of `key`, fp64.

    The product of the result with its transpose is a term of KL-Shampoo's average.
    """
    values = state[f"{key}_values"].double()
    values = values.clamp(min=eps).maximum(RESOLUTION * values.mean(-1, keepdim=True))
    return x @ state[f"{key}_basis"].double() * (values * x.shape[-1]).rsqrt()[..., None, :]


def _eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of symmetric matrices [..., n, n], fp64, by decreasing eigenvalue.

    In the null space, the basis consists of the eigenvectors of a decreasing diagonal matrix that is projected onto the
    null space.
    """
    values, vectors = torch.linalg.eigh(matrix)
    is_null = values <= NULL * values[..., -1:]
    if not is_null.any():
        return values.flip(-1), vectors.flip(-1)
    null = vectors * is_null[..., None, :]
    null = null @ null.mT
    ramp = torch.linspace(1, 0, matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    _, vectors = torch.linalg.eigh(matrix + TIE_BREAK * size * null * ramp @ null)
    return values.flip(-1), vectors.flip(-1)


def _power_iteration(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next basis after one power iteration as in the authors' code, and the permutation of the old basis's
    columns."""
    product = _shifted(matrix) @ basis
    order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
    columns = order[..., None, :].expand(product.shape)
    return torch.linalg.qr(product.gather(-1, columns)).Q, order


def _iterated(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalue estimates, in decreasing order, and the next basis, by emerging-optimizers' power iteration."""
    basis = torch.linalg.qr(_shifted(matrix) @ basis).Q
    values = (basis * (matrix @ basis)).sum(-2)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(-1, order), basis.gather(-1, order[..., None, :].expand(basis.shape))


def _shifted(matrix: Tensor) -> Tensor:
    """Return symmetric matrices plus a small multiple of the identity.

    A power iteration then keeps the directions in the null space. Without the shift, rounding would replace them.
    """
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return matrix + RESOLUTION * size * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _cost(item: TrainedParameter) -> float:
    """Return the relative cost of an update, without constant factors."""
    *_, rows, columns = item.placement.shape
    return float(rows + columns) ** 3


@register_optimizer("soap", state_bytes=lambda config: (STATE_BYTES, state_bytes_of("adamw", config)[1]))
def build_soap(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    """Build SOAP for matrices of layers and AdamW for the other parameters, with state at zero."""
    matrices = [item for item in parameters if item.placement.matrices is not None]
    rest = [item for item in parameters if item.placement.matrices is None]
    soap = SOAP(matrices, config)
    return combine([build_named("adamw", rest, config, precision), soap] if rest else [soap])
