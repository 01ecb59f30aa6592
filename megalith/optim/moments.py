"""Adam's moments in two bytes or one, each: bf16, or 8 bits in blocks (Dettmers et al. 2022).

A step widens a parameter's moments to fp32, moves them and the weights as Adam does, and rounds the moments again; on
a GPU that is one kernel (ops/kernels/moment_kernel.py). Moments move by a thousandth of themselves a step where beta2
is 0.999, less than half of what bf16 or 8 bits can tell apart: rounded to the nearest they would not move. So they are
rounded stochastically, up or down, with the mean of what is rounded.

`fp8` is a dynamic float: of 8 bits the sign, for the first moment; then zeros, each for a factor of 10; the rest cuts a
decade evenly. Values are those of a table from -1 to 1, times the largest of a block of 256 elements of a row or fewer.
A second moment is never rounded to 0, by which an update would be divided.

Every layout rounds alike: a block is cut from a row of the global parameter, so short that no rank of 8 or fewer along
it has a part of one (`block_of`), and the random bits are a hash of seed, name, step and the element's place in the
global parameter. Checkpoints have moments in fp32, which holds every value exactly: a run goes on with any other
`exp_avg_dtype`, in any layout, and bitwise with the same. Vectors, and matrices too small or too narrow for blocks,
have moments in fp32.

torchao's 8-bit Adam was weighed and left: its blocks are cut from what a rank holds, it rounds moments to the nearest,
and its state is a tensor subclass that a checkpoint would have to know.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError
from megalith.ops import kernels as fused

if TYPE_CHECKING:
    from megalith.optim.optimizer import TrainedParameter

BLOCK = 256  # elements that share a scale, at most
RANKS = 8  # that a row may be cut over without cutting a block
NARROWEST, SMALLEST = 8, 4096  # elements of a block and of a parameter; below, fp32 takes hardly more
RANDOM_BITS = 16  # of each element's hash for each moment
DECADES = 7
LEAST = 1e-30  # stands for a decay of 0, which has no logarithm


def block_of(shape: Sequence[int]) -> int | None:
    """Elements of a block in a parameter of this global shape; None: its moments are fp32."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return None
    width = shape[-1] // math.gcd(shape[-1], RANKS)
    block = next(size for size in range(min(BLOCK, width), 0, -1) if width % size == 0)
    return block if block >= NARROWEST else None


@cache
def dynamic_code(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """The values of the 8-bit dynamic float, ascending, float32: 255 with a sign, 256 without."""
    values = [1.0]
    for decade in range(DECADES):
        count = 2 ** (DECADES - decade - (1 if signed else 0))
        step = 0.9 / count
        values += [(1 - step * (place + 0.5)) * 10.0**-decade for place in range(count)]
    if signed:
        del values[1]  # so that the largest of a block has its own value whatever its sign
        values += [-value for value in values]
    return torch.tensor(sorted({0.0, *values}), dtype=torch.float32, device=device)


class Moment:
    """A moment of a parameter, in few bytes: float32 [..., width] to those who ask. A checkpoint's `Values`."""

    dtype = torch.float32

    def __init__(self, codes: Tensor, scales: Tensor | None, signed: bool):
        """`codes` bf16, or uint8 with `scales` float32 [..., blocks of a row]."""
        self.codes, self.scales, self.signed = codes, scales, signed

    @classmethod
    def zeros(cls, parameter: Tensor, kind: str, block: int, signed: bool) -> Moment:
        """Of the parameter's shape on its device, 0 everywhere. `kind`: bf16 or fp8."""
        if kind == "bf16":
            return cls(torch.zeros_like(parameter, dtype=torch.bfloat16), None, signed)
        blocks = (*parameter.shape[:-1], parameter.shape[-1] // block)
        zero = int(torch.searchsorted(dynamic_code(signed), torch.zeros(())))
        codes = torch.full_like(parameter, zero, dtype=torch.uint8)
        return cls(codes, torch.zeros(blocks, device=parameter.device), signed)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> list[Tensor]:
        """What it is stored in."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Moment:
        return Moment(self.codes[rows], None if self.scales is None else self.scales[rows], self.signed)

    def float(self) -> Tensor:
        """In fp32, a tensor of its own."""
        if self.scales is None:
            return self.codes.float()
        blocks = self.codes.unflatten(-1, (self.scales.shape[-1], -1))
        return _widened(blocks, self.scales[..., None], dynamic_code(self.signed, self.device)).flatten(-2)

    def stretches(self) -> Iterator[Tensor]:
        yield self.float().reshape(-1).view(torch.uint8)

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Takes fp32 values of its shape, rounded to the nearest: what `float` gives comes back as it was."""
        half = torch.full((), 2 ** (RANDOM_BITS - 1), dtype=torch.int64, device=self.device)
        if self.scales is None:
            self.codes.copy_(values)
            return
        blocks, code = (
            values.unflatten(-1, (self.scales.shape[-1], -1)),
            dynamic_code(self.signed, self.device),
        )
        largest = blocks.abs().amax(-1, keepdim=True)
        self.codes.copy_(_coded(blocks, largest, half, code).flatten(-2))
        self.scales.copy_(largest.squeeze(-1))


class ReducedAdam(torch.optim.Adam):
    """Adam or AdamW, fused, of which `reduced` parameters have moments in fewer bytes.

    It is stepped by `optimizer_step`, which sets `grad_scale` and `found_inf`. Nothing waits for the device.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any):
        super().__init__(groups, **settings)
        self.reduced: dict[nn.Parameter, tuple[Tensor, int]] = {}
        """Of each, where its shard stands (`_place`), and the elements of a block."""

    def take(self, item: TrainedParameter, dtypes: tuple[str, str]) -> bool:
        """Makes the state of a parameter, at zero, with moments of these `dtypes`; False: it has no blocks.

        Raises ConfigError where this rank has a part of a block.
        """
        parameter, shape = item.parameter, item.placement.shape or item.parameter.shape
        block, width = block_of(shape), parameter.shape[-1] if parameter.ndim else 1
        if block is None:
            return False
        if "fp8" in dtypes and width % block:
            raise ConfigError(
                f"optim.exp_avg_dtype {dtypes[0]} and exp_avg_sq_dtype {dtypes[1]}: fp8 has blocks of {block} in the "
                f"rows of {item.name}, which are {shape[-1]} long, and a rank has {width} of a row; choose bf16, or "
                "sizes of parallelism that leave blocks whole"
            )
        state = self.state[parameter] = {"step": torch.zeros((), device=parameter.device)}
        for key, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes):
            if dtype == "fp32":
                state[key] = torch.zeros_like(parameter)
            else:
                state[key] = Moment.zeros(parameter, dtype, block, signed=key == "exp_avg")
        self.reduced[parameter] = _place(item, shape), math.gcd(width, block)
        return True

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient. Gradients of reduced ones are left as they were."""
        own = [
            (group, p, p.grad)
            for group in self.param_groups
            for p in group["params"]
            if p in self.reduced and p.grad is not None
        ]
        for _, parameter, _ in own:
            parameter.grad = None  # which torch takes as: not to be stepped
        super().step()
        steps = [self.state[parameter]["step"] for _, parameter, _ in own]
        if steps:  # a list: the value of a single tensor would be read on the host
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        settings: dict[int, Tensor] = {}
        for (group, parameter, grad), step in zip(own, steps):
            parameter.grad = grad
            if id(group) not in settings:
                settings[id(group)] = self._settings(group, parameter.device)
            if parameter.numel():
                self._step_one(parameter, grad, step, settings[id(group)], group)

    def _settings(self, group: dict[str, Any], device: torch.device) -> Tensor:
        """What compiled code must not take for constants, filled in on the device without a wait: float32 [4]."""
        given = [torch.full((), float(group[name]), device=device) for name in ("lr", "weight_decay")]
        return torch.stack([*given, self.grad_scale.float(), self.found_inf.float()])

    def _step_one(
        self, parameter: Tensor, grad: Tensor, step: Tensor, settings: Tensor, group: dict[str, Any]
    ) -> None:
        place, block = self.reduced[parameter]
        stored = []
        for key in ("exp_avg", "exp_avg_sq"):
            moment = self.state[parameter][key]
            kept = [moment] if isinstance(moment, Tensor) else moment.tensors
            code = None if len(kept) == 1 else dynamic_code(moment.signed, parameter.device)
            scales = None if code is None else kept[1].view(-1, 1)
            stored.append(_Stored(kept[0].view(-1, block), scales, code))
        run = fused.step_moments_ if fused.AVAILABLE and parameter.is_cuda else _step
        rule = group["betas"], not group["decoupled_weight_decay"], group["eps"]
        blocks = parameter.view(-1, block), grad.contiguous().view(-1, block)
        run(*blocks, *stored, step.view(1), settings, place, *rule)


def _place(item: TrainedParameter, shape: Sequence[int]) -> Tensor:
    """What `_random_bits` needs of a shard, int64 [6]: a key of seed and name; where its first row stands among the
    rows of the global parameter; rows of a matrix here and there; columns here, and where they begin."""
    digest = hashlib.blake2b(f"{item.placement.seed}/{item.name}".encode(), digest_size=4).digest()
    here, offset = item.parameter.shape, item.placement.offset or (0,) * len(shape)
    first = 0
    for size, at in zip(shape[:-1], offset):
        first = first * size + at
    numbers = [int.from_bytes(digest, "little"), first, max(here[-2], 1), shape[-2], here[-1], offset[-1]]
    return torch.tensor(numbers, device=item.parameter.device)


class _Stored(NamedTuple):
    """What a moment of a shard [blocks, block] is stored in."""

    values: Tensor
    scales: Tensor | None
    code: Tensor | None


def _step(
    value: Tensor, grad: Tensor, first: _Stored, second: _Stored, step: Tensor, settings: Tensor, place: Tensor,
    betas: tuple[float, float], adds_decay: bool, eps: float,
) -> None:  # fmt: skip
    """One step of a shard [blocks, block], in place; `step` float32 [1], this one counted. `settings` as `_settings`
    has them."""
    lr, decay, grad_scale, found_inf = settings.unbind()
    bits, skipped = _random_bits(place, step, value), found_inf > 0
    g = grad.float() / grad_scale
    if adds_decay:
        g = g + decay * value
    m = betas[0] * _widened(*first) + (1 - betas[0]) * g
    v = betas[1] * _widened(*second) + (1 - betas[1]) * g * g
    # Of 1 - beta^step nothing is lost while it is small.
    narrowed, corrected = (-torch.expm1(step * math.log(beta or LEAST)) for beta in betas)
    root = (v / corrected).sqrt()
    x = value if adds_decay else value - lr * decay * value
    value.copy_(torch.where(skipped, value, x - lr / narrowed * m / (root + eps)))
    for moment, kept, random in ((m, first, bits & 0xFFFF), (v, second, bits >> RANDOM_BITS)):
        if kept.code is None:
            rounded = moment if kept.values.dtype == moment.dtype else _to_bf16(moment, random)
        else:
            largest = moment.abs().amax(-1, keepdim=True)
            rounded = _coded(moment, largest, random, kept.code)
            kept.scales.copy_(torch.where(skipped, kept.scales, largest))
        kept.values.copy_(torch.where(skipped, kept.values, rounded))


def _widened(values: Tensor, scales: Tensor | None, code: Tensor | None) -> Tensor:
    return values.float() if code is None else code[values.int()] * scales


def _to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Rounds up in magnitude where `random`, 16 bits, is below the 16 that bf16 has not."""
    raw = values.view(torch.int32) + random.to(torch.int32)
    return (raw & -(2**RANDOM_BITS)).view(torch.float32).to(torch.bfloat16)


def _coded(values: Tensor, largest: Tensor, random: Tensor, code: Tensor) -> Tensor:
    """The codes of values [..., block], uint8, of which [..., 1] are the largest; `random` as in `_to_bf16`."""
    x = values / torch.where(largest > 0, largest, 1.0)
    below = (torch.bucketize(x, code, right=True) - 1).clamp(0, code.shape[0] - 2)
    low, high = code[below], code[below + 1]
    codes = below + (random < (x - low) / (high - low) * 2**RANDOM_BITS).long()
    if code.shape[0] % 2 == 0:  # without a sign
        codes = torch.where(values > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8)


def _random_bits(place: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """32 bits for each element of a shard [blocks, block], int64: a hash of what `_place` has, of step and element.

    In int64 with masks, for the reason that ops/dropout.py tells.
    """
    key, first, rows_here, rows, columns_here, column = place.unbind()
    blocks, block = like.shape
    starts = torch.arange(blocks, device=like.device) * block  # in the shard, flattened
    row = starts // columns_here
    row = first + row // rows_here * rows + row % rows_here  # in the global parameter
    keys = _mixed((row & 0xFFFFFFFF) ^ _mixed(key ^ _mixed(step.long())))
    columns = (column + starts % columns_here)[:, None] + torch.arange(block, device=like.device)
    return _mixed(keys[:, None] ^ (columns * 0x9E3779B1 & 0xFFFFFFFF))


def _mixed(h: Tensor) -> Tensor:
    """Murmur3's finalizer of numbers below 2^32, int64."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)
