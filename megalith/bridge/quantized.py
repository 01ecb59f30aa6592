"""Weights in one byte each, for inference: how a matrix becomes codes and scales, and what config.json says of them.

fp8   e4m3 codes of blocks of 128 × 128, each with the scale amax / 448 (DeepSeek-V3's form: `weight_scale_inv`)
int8  codes of −127 to 127, each row with the scale amax / 127 (compressed-tensors' int-quantized form: `weight_scale`)

Both are read too: as what the codes stand for, in the type that config.json says.

mxfp4  e2m1 codes of 32 at a time with one power of two (OCP Microscaling Formats 1.0): read alone, as gpt-oss's
       experts are published

Activations are quantised by the inference engine as they come. Matrices of the layers' linears and of experts are
quantised; embeddings, the output matrix, routers, norms and biases stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megalith.bridge.family import LAYER, Group
from megalith.checkpoint.files import DTYPE_CODES, DTYPES, Layout, SafetensorsEntry
from megalith.errors import CheckpointError, ConfigError

MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below 0
SCALED_TOGETHER = 32
BLOCKS, SCALES = "_blocks", "_scales"

Form = Literal["fp8", "int8"]
FORMS: tuple[Form, ...] = ("fp8", "int8")
BLOCK = 128
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SUFFIX = {"fp8": "_scale_inv", "int8": "_scale"}
LARGEST = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}


def quantized_names(groups: Iterable[Group], form: Form, not_in_fp8: str = "") -> set[str]:
    """Their tensors that become codes, but in fp8 for names that end in `not_in_fp8`. Raises ConfigError where a
    family stores them in a form that has none, and for experts in int8, which transformers could not read."""
    found = set()
    for group in groups:
        if not _is_linear(group.name):
            continue
        if group.rule.transposed or any(len(shape) != 2 for shape in group.sources.values()):
            raise ConfigError(
                f"--quantize takes matrices [out, in], but {next(iter(group.sources))} is stored otherwise; "
                "choose a family that keeps them apart, by --family, or leave --quantize out"
            )
        if form == "int8" and len(group.shape) == 3:
            raise ConfigError(
                f"--quantize int8 makes codes of a linear's rows, but {next(iter(group.sources))} is an expert's, and "
                "transformers, which has all experts of a layer in one tensor, reads none of them in "
                "compressed-tensors' form; choose --quantize fp8"
            )
        found |= group.sources.keys()
    if form == "fp8" and not_in_fp8:
        return {name for name in found if not name.endswith(not_in_fp8)}
    return found


def _is_linear(name: str) -> bool:
    """Whether a parameter of ours is the matrix of a layer's linear."""
    *_, module, kind = name.split(".")
    return LAYER.match(name) is not None and module.startswith("linear_") and kind == "weight"


def with_scales(
    tensors: Layout, names: set[str], form: Form
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of the folder: `names` in codes, each with its scales behind it."""
    found = {}
    for name, (dtype, shape) in dict(tensors).items():
        found[name] = (CODES[form] if name in names else dtype, shape)
        if name in names:
            found[name + SUFFIX[form]] = (torch.float32, scale_shape(shape, form))
    return found


def scale_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    return tuple(math.ceil(size / BLOCK) for size in shape) if form == "fp8" else (shape[0], 1)


def notes_on_blocks(tensors: Layout, names: set[str], form: Form) -> list[str]:
    """What to tell of `names` in fp8 whose last blocks are not whole."""
    for name, (_, shape) in dict(tensors).items():
        if form == "fp8" and name in names and any(size > BLOCK and size % BLOCK for size in shape):
            return [
                f"{name} is {list(shape)}, which {BLOCK} does not divide: transformers, where it has no FP8 and "
                "dequantises, takes blocks of equal sizes and so reads other weights; there take --quantize int8"
            ]
    return []


def quantize(matrix: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and float32 scales of a float32 matrix [out, in]: codes · scale is nearest to it."""
    rows, columns = matrix.shape
    if form == "int8":
        scale = matrix.abs().amax(1, keepdim=True) / LARGEST[form]
        return (matrix / _divisor(scale)).round().to(torch.int8), scale
    down, across = scale_shape(matrix.shape, form)
    padded = torch.nn.functional.pad(matrix, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    row_slices = padded.view(down, BLOCK, across, BLOCK)
    scale = row_slices.abs().amax((1, 3)) / LARGEST[form]
    codes = (row_slices / _divisor(scale)[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scale


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def quantization_config(form: Form, tensors: Layout, names: set[str], output: str) -> dict[str, Any]:
    """What config.json says, under `quantization_config`. `output` is the output matrix, which is not among the
    `tensors` where it is the embedding; transformers has it as lm_head too."""
    others = {name for name, (_, shape) in dict(tensors).items() if len(shape) == 2} - names
    linears = {name for name in others if "embed" not in name} | {output}
    kept = sorted({"lm_head"} | {name.removesuffix(".weight") for name in linears})
    if form == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }


@dataclass(frozen=True)
class MXFP4Experts:
    """The matrices of all experts, [experts, in, out], whose rows of out are stored in MXFP4: blocks of codes uint8
    [experts, out, in / 32, 16], the first of two in the lower half of a byte, and scales uint8 [experts, out, in / 32],
    the power of two plus 127."""

    row_slices: SafetensorsEntry
    scales: SafetensorsEntry
    dtype: ClassVar[str] = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.row_slices.shape
        return experts, groups * SCALED_TOGETHER, rows

    def read(self) -> Tensor:
        """Of all experts, in bfloat16, which holds every value."""
        return self[:]

    def __getitem__(self, which: int | slice) -> Tensor:
        """Of one expert, [in, out], or of some."""
        codes, scales = self.row_slices.read()[which], self.scales.read()[which]
        values = torch.tensor([*MXFP4, *(-value for value in MXFP4)], dtype=torch.bfloat16)
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [..., out, in / 32, 32]
        found = torch.ldexp(values[halves.int()], scales[..., None].int() - 127)
        return found.flatten(-2).transpose(-2, -1)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in] in codes of a byte: fp8 with a scale a block, or int8 with one a row."""

    codes: SafetensorsEntry
    scales: SafetensorsEntry
    block: tuple[int, int]  # rows and columns that share a scale
    dtype: str  # of what is read

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self) -> Tensor:
        """The codes times their scales."""
        codes, scales = self.codes.read().float(), self.scales.read().float()
        for dim, size in enumerate(self.block):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
        return (codes * scales).to(DTYPES[self.dtype])


def unpack_quantized(tensors: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A folder's tensors with those that are stored in codes under one name each, where config.json says that there
    are such; matrices in codes of a byte are of `dtype` then. Raises CheckpointError for codes and scales of shapes
    that do not go together."""
    told = config.get("quantization_config")
    method = told.get("quant_method") if isinstance(told, dict) else None
    if method == "mxfp4":
        return _with_experts(tensors)
    if method == "compressed-tensors" and told.get("format") == "int-quantized":
        return _with_matrices(tensors, "int8", None, dtype)
    block = told.get("weight_block_size") if method == "fp8" else None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return _with_matrices(tensors, "fp8", block, dtype)
    return dict(tensors)


def _with_matrices(
    tensors: Mapping[str, Any], form: Form, block: list[int] | None, dtype: str
) -> dict[str, Any]:
    found, code = dict(tensors), DTYPE_CODES[CODES[form]]
    for name in [name for name, stored in tensors.items() if stored.dtype == code]:
        if (scales := found.pop(name + SUFFIX[form], None)) is None:
            continue  # refused by its type
        shape, size = tensors[name].shape, block or [1, *tensors[name].shape[1:]]
        wanted = tuple(math.ceil(one / each) for one, each in zip(shape, size))
        if len(shape) != 2 or scales.shape != wanted or scales.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{name} is {list(shape)} of {code} and its scales {list(scales.shape)} of {scales.dtype}, but {form} "
                f"here has a number for each {'row' if block is None else 'block of ' + str(block)} of a matrix; fetch "
                "it again, or take the original"
            )
        found[name] = QuantizedMatrix(tensors[name], scales, tuple(size), dtype)
    return found


def _with_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        whole = name.removesuffix(BLOCKS)
        if whole + SCALES not in tensors:
            continue  # listed as no tensor of this model
        row_slices, scales = found.pop(name), found.pop(whole + SCALES)
        fits = len(row_slices.shape) == 4 and row_slices.shape[3] * 2 == SCALED_TOGETHER
        if not fits or row_slices.shape[:3] != scales.shape or {row_slices.dtype, scales.dtype} != {"U8"}:
            raise CheckpointError(
                f"{name} is {list(row_slices.shape)} of {row_slices.dtype} and its scales {list(scales.shape)} of "
                f"{scales.dtype}, but MXFP4 is uint8 [experts, out, in / 32, 16] and [experts, out, in / 32]; fetch it "
                "again"
            )
        found[whole] = MXFP4Experts(row_slices, scales)
    return found
