"""Moments in bf16 or in 8 bits with a scale per block (Dettmers et al. 2022), and Adam with such moments.

A step of Adam converts a parameter's moments to fp32, updates moments and weights as Adam does, and rounds the moments;
on a GPU this is one kernel (ops/kernels/moment_kernel.py). Rounding is stochastic: with beta2 0.999 a moment changes by
a thousandth per step, less than half the resolution of bf16 or 8 bits, so rounding to nearest would never change it.

`fp8` is a dynamic float. The first moment has a sign bit. Then comes a run of zero bits, each of which divides the
value by 10. The remaining bits divide a decade evenly. A value is a table entry in [-1, 1] times the largest magnitude
in its block. A block has at most 256 elements of a row. Second moments are never rounded to 0, because updates are
divided by them.

All layouts round identically: blocks are parts of rows of the global parameter, small enough that sharding a row over
up to 8 ranks never splits a block, and the random bits are a hash of seed, name, step and global index. Checkpoints
store moments in fp32, which represents every value exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megalith.errors import ConfigError
from megalith.ops import kernels as fused

if TYPE_CHECKING:
    from megalith.optim.optimizer import TrainedParameter

MAX_BLOCK = 256  # elements that share a scale
MAX_SHARDS = 8  # a row can be divided into this many shards without dividing a block
MIN_BLOCK, MIN_NUMEL = 8, 4096  # elements of a block and of a parameter; below, moments are fp32
RANDOM_BITS = 16  # per element and moment
DECADES = 7
MIN_BETA = 1e-30  # replaces a beta of 0, which has no logarithm


def block_size_for(shape: Sequence[int]) -> int | None:
    """Return the block size of the moments of a parameter of this global shape, or None for fp32 moments.

    Vectors, and matrices that are too small or too narrow, have fp32 moments.
    """
    if len(shape) < 2 or math.prod(shape) < MIN_NUMEL:
        return None
    width = shape[-1] // math.gcd(shape[-1], MAX_SHARDS)
    block = next(size for size in range(min(MAX_BLOCK, width), 0, -1) if width % size == 0)
    return block if block >= MIN_BLOCK else None


@cache
def dynamic_code(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return the values of the 8-bit dynamic float in ascending order, float32 [255] if signed, otherwise [256]."""
    values = [1.0]
    for decade in range(DECADES):
        count = 2 ** (DECADES - decade - (1 if signed else 0))
        step = 0.9 / count
        values += [(1 - step * (i + 0.5)) * 10.0**-decade for i in range(count)]
    if signed:
        del values[1]  # leaves a code for ±1, so that a block's largest value is exact
        values += [-value for value in values]
    return torch.tensor(sorted({0.0, *values}), dtype=torch.float32, device=device)


class Moment:
    """Moment of a parameter, stored in bf16 or 8 bits and used as float32 [..., width]. Implements the checkpoint's
    `Values`.
    """

    dtype = torch.float32

    def __init__(self, codes: Tensor, scales: Tensor | None, signed: bool):
        """Store `codes` in bf16, or in uint8 with `scales`, float32 [..., blocks per row]."""
        self.codes, self.scales, self.signed = codes, scales, signed

    @classmethod
    def zeros(cls, parameter: Tensor, kind: str, block: int, signed: bool) -> Moment:
        """Return a zero moment with the parameter's shape and device. `kind` is bf16 or fp8."""
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
        """Tensors that store the moment."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Moment:
        return Moment(self.codes[rows], None if self.scales is None else self.scales[rows], self.signed)

    def float(self) -> Tensor:
        """Return the moment's values in fp32."""
        if self.scales is None:
            return self.codes.float()
        blocks = self.codes.unflatten(-1, (self.scales.shape[-1], -1))
        return _dequantize(blocks, self.scales[..., None], dynamic_code(self.signed, self.device)).flatten(-2)

    def in_blocks(self, block: int) -> _StoredMoment:
        """Return views of the storage in blocks of `block` elements."""
        code = None if self.scales is None else dynamic_code(self.signed, self.device)
        scales = None if self.scales is None else self.scales.view(-1, 1)
        return _StoredMoment(self.codes.view(-1, block), scales, code)

    def byte_chunks(self) -> Iterator[Tensor]:
        yield self.float().reshape(-1).view(torch.uint8)

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Store fp32 values of the same shape, rounded to nearest. Values returned by `float` are stored exactly."""
        half = torch.full((), 2 ** (RANDOM_BITS - 1), dtype=torch.int64, device=self.device)
        if self.scales is None:
            self.codes.copy_(values)
            return
        blocks, code = (
            values.unflatten(-1, (self.scales.shape[-1], -1)),
            dynamic_code(self.signed, self.device),
        )
        largest = blocks.abs().amax(-1, keepdim=True)
        self.codes.copy_(_quantize(blocks, largest, half, code).flatten(-2))
        self.scales.copy_(largest.squeeze(-1))


@dataclass(frozen=True)
class ReducedMoment:
    """Storage of a parameter's moments in `kind`, bf16 or fp8, and their rounding."""

    like: nn.Parameter
    """This rank's shard."""
    kind: str
    block: int
    """Elements of a row that are rounded together."""
    position: Tensor
    """Position of the shard (`_shard_position`)."""

    @classmethod
    def of(cls, item: TrainedParameter, kind: str, settings: str) -> ReducedMoment | None:
        """Return the storage of a parameter's moments, or None if the moments are fp32.

        Raises ConfigError, which names the `settings`, if this rank's shard would split a block.
        """
        parameter, shape = item.parameter, item.placement.shape or item.parameter.shape
        block, width = block_size_for(shape), parameter.shape[-1] if parameter.ndim else 1
        if block is None or kind == "fp32":
            return None
        if kind == "fp8" and width % block:
            raise ConfigError(
                f"{settings}: fp8 divides each row of {item.name} ({shape[-1]} elements) into blocks of {block}, but "
                f"this rank holds {width} elements of a row; choose bf16, or parallel sizes that do not divide blocks"
            )
        return cls(parameter, kind, math.gcd(width, block), _shard_position(item, shape))

    def zeros(self, signed: bool) -> Moment:
        """Return a moment of zeros."""
        return Moment.zeros(self.like, self.kind, self.block, signed)

    def store(self, moment: Moment, values: Tensor, step: Tensor, number: int, skip: Tensor) -> None:
        """Round fp32 `values` into `moment`, unless `skip` is true.

        Args:
            moment: moment to change, created by `zeros`.
            values: new values, of the shard's shape.
            step: fp32 scalar, this step's number.
            number: index of the moment, 0 or 1, so that the moments of a parameter get different random bits.
            skip: bool scalar.
        """
        if not values.numel():
            return
        blocks = values.reshape(-1, self.block)
        random = _random_bits(self.position, step, blocks) >> number * RANDOM_BITS & 0xFFFF
        _store_rounded(moment.in_blocks(self.block), blocks, random, skip)


class ReducedAdam(torch.optim.Adam):
    """Fused Adam or AdamW whose `reduced` parameters have moments in bf16 or 8 bits.

    `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`. The host never waits for the device.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any):
        super().__init__(groups, **settings)
        self.reduced: dict[nn.Parameter, tuple[Tensor, int]] = {}
        """Position of each reduced parameter's shard (`_shard_position`), and its block size."""

    def add_reduced_state(self, item: TrainedParameter, dtypes: tuple[str, str]) -> bool:
        """Create a parameter's state, zeros in these `dtypes`. Return False if the parameter needs fp32 moments.

        Raises ConfigError if this rank's shard would split a block.
        """
        parameter, settings = item.parameter, "optim.exp_avg_dtype {} and exp_avg_sq_dtype {}".format(*dtypes)
        storages = [ReducedMoment.of(item, dtype, settings) for dtype in dtypes]
        first = next((storage for storage in storages if storage is not None), None)
        if first is None:
            return False
        state = self.state[parameter] = {"step": torch.zeros((), device=parameter.device)}
        for key, storage in zip(("exp_avg", "exp_avg_sq"), storages):
            state[key] = torch.zeros_like(parameter) if storage is None else storage.zeros(key == "exp_avg")
        self.reduced[parameter] = first.position, first.block
        return True

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Gradients of reduced parameters stay unchanged."""
        reduced = [
            (group, p, p.grad)
            for group in self.param_groups
            for p in group["params"]
            if p in self.reduced and p.grad is not None
        ]
        for _, parameter, _ in reduced:
            parameter.grad = None  # hides it from torch's step
        super().step()
        steps = [self.state[parameter]["step"] for _, parameter, _ in reduced]
        if steps:  # a list, because torch would read the value of a single tensor on the host
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        settings: dict[int, Tensor] = {}
        for (group, parameter, grad), step in zip(reduced, steps):
            parameter.grad = grad
            if id(group) not in settings:
                settings[id(group)] = self._settings(group, parameter.device)
            if parameter.numel():
                self._step_parameter(parameter, grad, step, settings[id(group)], group)

    def _settings(self, group: dict[str, Any], device: torch.device) -> Tensor:
        """Return lr, weight decay, grad_scale and found_inf, float32 [4] on the device.

        Compiled code would specialize on Python numbers.
        """
        rates = [torch.full((), float(group[name]), device=device) for name in ("lr", "weight_decay")]
        return torch.stack([*rates, self.grad_scale.float(), self.found_inf.float()])

    def _step_parameter(
        self, parameter: Tensor, grad: Tensor, step: Tensor, settings: Tensor, group: dict[str, Any]
    ) -> None:
        position, block = self.reduced[parameter]
        moments = []
        for key in ("exp_avg", "exp_avg_sq"):
            moment = self.state[parameter][key]
            if isinstance(moment, Tensor):
                moments.append(_StoredMoment(moment.view(-1, block), None, None))
            else:
                moments.append(moment.in_blocks(block))
        run = fused.step_moments_ if fused.AVAILABLE and parameter.is_cuda else _step
        rule = group["betas"], not group["decoupled_weight_decay"], group["eps"]
        blocks = parameter.view(-1, block), grad.contiguous().view(-1, block)
        run(*blocks, *moments, step.view(1), settings, position, *rule)


def _shard_position(item: TrainedParameter, shape: Sequence[int]) -> Tensor:
    """Return the position of a shard in its global parameter, as the six numbers that `_random_bits` needs: int64 [6].

    The six entries are: a key from seed and name, the index of the shard's first row in the global parameter, the rows
    per matrix in the shard, the rows per matrix in the global parameter, the columns of the shard, and the index of its
    first column.
    """
    digest = hashlib.blake2b(f"{item.placement.seed}/{item.name}".encode(), digest_size=4).digest()
    here, offset = item.parameter.shape, item.placement.offset or (0,) * len(shape)
    first = 0
    for size, at in zip(shape[:-1], offset):
        first = first * size + at
    position = [int.from_bytes(digest, "little"), first, max(here[-2], 1), shape[-2], here[-1], offset[-1]]
    return torch.tensor(position, device=item.parameter.device)


class _StoredMoment(NamedTuple):
    """Stored moment of a shard: values [blocks, block] and, for fp8, scales [blocks, 1] and the code table."""

    values: Tensor
    scales: Tensor | None
    code: Tensor | None


def _step(
    value: Tensor, grad: Tensor, first: _StoredMoment, second: _StoredMoment, step: Tensor, settings: Tensor,
    position: Tensor, betas: tuple[float, float], coupled_decay: bool, eps: float,
) -> None:  # fmt: skip
    """Update a shard [blocks, block] in place. `step` is float32 [1] and includes this step; `settings` come from
    `_settings`."""
    lr, decay, grad_scale, found_inf = settings.unbind()
    bits, skipped = _random_bits(position, step, value), found_inf > 0
    g = grad.float() / grad_scale
    if coupled_decay:
        g = g + decay * value
    m = betas[0] * _dequantize(*first) + (1 - betas[0]) * g
    v = betas[1] * _dequantize(*second) + (1 - betas[1]) * g * g
    # expm1 keeps 1 - beta^step exact while it is small.
    correction1, correction2 = (-torch.expm1(step * math.log(beta or MIN_BETA)) for beta in betas)
    root = (v / correction2).sqrt()
    x = value if coupled_decay else value - lr * decay * value
    value.copy_(torch.where(skipped, value, x - lr / correction1 * m / (root + eps)))
    for moment, stored, random in ((m, first, bits & 0xFFFF), (v, second, bits >> RANDOM_BITS)):
        _store_rounded(stored, moment, random, skipped)


def _store_rounded(stored: _StoredMoment, moment: Tensor, random: Tensor, skipped: Tensor) -> None:
    """Round a moment [blocks, block] into its storage, unless `skipped` is true."""
    if stored.code is None:
        rounded = moment if stored.values.dtype == moment.dtype else _round_to_bf16(moment, random)
    else:
        largest = moment.abs().amax(-1, keepdim=True)
        rounded = _quantize(moment, largest, random, stored.code)
        stored.scales.copy_(torch.where(skipped, stored.scales, largest))
    stored.values.copy_(torch.where(skipped, stored.values, rounded))


def _dequantize(values: Tensor, scales: Tensor | None, code: Tensor | None) -> Tensor:
    return values.float() if code is None else code[values.int()] * scales


def _round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Round values to bf16 stochastically: up in magnitude where `random` (16 bits) is less than the dropped bits."""
    raw = values.view(torch.int32) + random.to(torch.int32)
    return (raw & -(2**RANDOM_BITS)).view(torch.float32).to(torch.bfloat16)


def _quantize(values: Tensor, largest: Tensor, random: Tensor, code: Tensor) -> Tensor:
    """Return the codes of values [..., block], uint8. `largest` [..., 1] is each block's largest magnitude; `random`
    has 16 bits per element."""
    x = values / torch.where(largest > 0, largest, 1.0)
    below = (torch.bucketize(x, code, right=True) - 1).clamp(0, code.shape[0] - 2)
    low, high = code[below], code[below + 1]
    codes = below + (random < (x - low) / (high - low) * 2**RANDOM_BITS).long()
    if code.shape[0] % 2 == 0:  # unsigned
        codes = torch.where(values > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8)


def _random_bits(position: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """Return 32 random bits per element of a shard [blocks, block], int64: a hash of key, step and global index.

    Computed in int64 with masks for the same reason as in ops/dropout.py.
    """
    key, first, rows_here, rows, columns_here, column = position.unbind()
    blocks, block = like.shape
    starts = torch.arange(blocks, device=like.device) * block  # in the flattened shard
    row = starts // columns_here
    row = first + row // rows_here * rows + row % rows_here  # in the global parameter
    keys = _murmur_mix((row & 0xFFFFFFFF) ^ _murmur_mix(key ^ _murmur_mix(step.long())))
    columns = (column + starts % columns_here)[:, None] + torch.arange(block, device=like.device)
    return _murmur_mix(keys[:, None] ^ (columns * 0x9E3779B1 & 0xFFFFFFFF))


def _murmur_mix(h: Tensor) -> Tensor:
    """Apply Murmur3's finalizer to integers below 2^32, int64."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)
