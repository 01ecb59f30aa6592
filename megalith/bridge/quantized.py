"""Quantized weights for inference: values, scales and the entry in config.json.

fp8    e4m3, one scale amax / 448 per block of 128 × 128 (DeepSeek-V3's format: `weight_scale_inv`)
int8   −127 to 127, one scale amax / 127 per row (compressed-tensors' int-quantized format: `weight_scale`)
mxfp4  e2m1, one power of two per 32 values (OCP Microscaling Formats 1.0); read only, for gpt-oss's experts
nf4    bitsandbytes' 4-bit NormalFloat, with or without double quantization; read only

fp8 and int8 are also read, and dequantized to the dtype in config.json. Linears of layers and experts are quantized,
but not embeddings, the output matrix, routers, norms and biases. The inference engine quantizes activations
dynamically.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megalith.bridge.family import LAYER, Group
from megalith.checkpoint.files import DTYPE_CODES, DTYPES, Layout, SafetensorsEntry
from megalith.errors import CheckpointError, ConfigError
from megalith.ops.weight_codes import (
    ABSMAX_BLOCK,
    FP8_BLOCK,
    MXFP4,
    CodedMatrix,
    assemble,
    decode,
    fp8_codes,
    fp8_matrix,
    int8_codes,
    nested_nf4_matrix,
)
from megalith.ops.weight_codes import BLOCK as BLOCKS_OF

SCALED_TOGETHER = 32
BLOCKS, SCALES = "_blocks", "_scales"

Form = Literal["fp8", "int8"]
FORMS: tuple[Form, ...] = ("fp8", "int8")
BLOCK = FP8_BLOCK
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SUFFIX = {"fp8": "_scale_inv", "int8": "_scale"}
LARGEST = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}


def quantized_names(groups: Iterable[Group], form: Form, not_in_fp8: str = "") -> set[str]:
    """Return the names of the Hugging Face tensors to quantize. In fp8, names that end in `not_in_fp8` are excluded.

    Raises ConfigError if the family does not store them as matrices [out, in], and for experts in int8, which
    transformers cannot read.
    """
    names = set()
    for group in groups:
        if not is_linear(group.name):
            continue
        if group.rule.transposed or any(len(shape) != 2 for shape in group.sources.values()):
            raise ConfigError(
                f"--quantize needs matrices [out, in], but {next(iter(group.sources))} has another layout; "
                "choose a family with separate matrices (--family), or remove --quantize"
            )
        if form == "int8" and len(group.shape) == 3:
            raise ConfigError(
                f"--quantize int8 is not supported for experts ({next(iter(group.sources))}): transformers keeps all "
                "experts of a layer in one tensor and cannot read them in compressed-tensors' format; choose "
                "--quantize fp8"
            )
        names |= group.sources.keys()
    if form == "fp8" and not_in_fp8:
        return {name for name in names if not name.endswith(not_in_fp8)}
    return names


def is_linear(name: str) -> bool:
    """Return True if a Megalith parameter is the weight of a layer's linear."""
    *_, module, kind = name.split(".")
    return LAYER.match(name) is not None and module.startswith("linear_") and kind == "weight"


def with_scales(
    tensors: Layout, names: set[str], form: Form
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the layout of a folder whose tensors `names` are stored quantized, each followed by its scales."""
    stored = {}
    for name, (dtype, shape) in dict(tensors).items():
        stored[name] = (CODES[form] if name in names else dtype, shape)
        if name in names:
            stored[name + SUFFIX[form]] = (torch.float32, scale_shape(shape, form))
    return stored


def scale_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    return tuple(math.ceil(size / BLOCK) for size in shape) if form == "fp8" else (shape[0], 1)


def notes_on_blocks(tensors: Layout, names: set[str], form: Form) -> list[str]:
    """Return a note if a matrix in fp8 has an incomplete last block."""
    for name, (_, shape) in dict(tensors).items():
        if form == "fp8" and name in names and any(size > BLOCK and size % BLOCK for size in shape):
            return [
                f"{name} is {list(shape)}, which is not divisible by {BLOCK}, and transformers without FP8 support "
                "would dequantize partial blocks wrongly; use --quantize int8"
            ]
    return []


def quantize(matrix: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Quantize a float32 matrix [out, in]. Return values in the quantized dtype [out, in], and float32 scales."""
    return int8_codes(matrix) if form == "int8" else fp8_codes(matrix)


def quantization_config(form: Form, tensors: Layout, names: set[str], output: str) -> dict[str, Any]:
    """Return config.json's `quantization_config`.

    `output` is the name of the output matrix, which is missing in `tensors` if it is tied; transformers calls it
    lm_head then.
    """
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
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
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
    """Matrices of all experts [experts, in, out], stored in MXFP4.

    Values are uint8 [experts, out, in / 32, 16] with the first of two values in the lower half of a byte. Scales are
    uint8 [experts, out, in / 32]: the exponent of two plus 127.
    """

    blocks: SafetensorsEntry
    scales: SafetensorsEntry
    dtype: ClassVar[str] = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, groups * SCALED_TOGETHER, rows

    def read(self) -> Tensor:
        """Return the matrices of all experts in bfloat16, which is exact."""
        return self[:]

    def __getitem__(self, experts: int | slice) -> Tensor:
        """Return the matrices of some experts, or the matrix [in, out] of one."""
        codes, scales = self.blocks.read()[experts], self.scales.read()[experts]
        values = torch.tensor(MXFP4, dtype=torch.bfloat16)
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [..., out, in / 32, 32]
        matrices = torch.ldexp(values[halves.int()], scales[..., None].int() - 127)
        return matrices.flatten(-2).transpose(-2, -1)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in] in fp8 with one scale per block, or in int8 with one per row."""

    codes: SafetensorsEntry
    scales: SafetensorsEntry
    block: tuple[int, int]  # rows and columns that share a scale
    dtype: str  # of the dequantized matrix

    @property
    def form(self) -> str | None:
        """Quantization format in ops/weight_codes.py with the same values and scales, or None if there is none."""
        if self.codes.dtype == DTYPE_CODES[torch.int8]:
            return "int8" if self.block[0] == 1 else None
        return "fp8" if self.block == (BLOCK, BLOCK) else None

    def coded(self, rows: Tensor, device: torch.device | str) -> CodedMatrix:
        """Return the stored quantized values without change. `rows` are the matrix's row indices in the weight."""
        codes, scales = self.codes.read().to(device), self.scales.read().float().to(device)
        return CodedMatrix(rows, codes, scales) if self.form == "int8" else fp8_matrix(rows, codes, scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self) -> Tensor:
        """Return the dequantized matrix."""
        codes, scales = self.codes.read().float(), self.scales.read().float()
        for dim, size in enumerate(self.block):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
        return (codes * scales).to(DTYPES[self.dtype])


@dataclass(frozen=True)
class NF4Matrix:
    """A matrix [out, in] that bitsandbytes has stored in NF4, with or without double quantization."""

    tensors: Mapping[str, SafetensorsEntry]  # by the end of the name; "" are the codes
    shape: tuple[int, int]
    mean: float | None  # of the absmaxes; None without double quantization
    dtype: str  # of the dequantized matrix
    form: ClassVar[str] = "nf4"

    def coded(self, rows: Tensor, device: torch.device | str) -> CodedMatrix:
        """Return the stored quantized values without change. `rows` are the matrix's row indices in the weight."""
        out, columns = self.shape
        codes = self.tensors[""].read().to(device).view(out, columns // 2)
        absmax = self.tensors["absmax"].read().to(device).view(out, -1)
        if self.mean is None:
            return CodedMatrix(rows, codes, absmax.float())
        scale = self.tensors["nested_absmax"].read().float().to(device)
        return nested_nf4_matrix(rows, codes, absmax, scale, torch.tensor(self.mean, device=device))

    def read(self) -> Tensor:
        """Return the dequantized matrix."""
        coded = assemble("nf4", self.shape, [self.coded(torch.arange(self.shape[0]), "cpu")])
        return decode("nf4", coded, DTYPES[self.dtype])


STATE = ".quant_state.bitsandbytes__nf4"
NF4_PARTS = ("absmax", "nested_absmax", "quant_map", "nested_quant_map")


def _with_nf4_matrices(tensors: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Replace the tensors of each matrix that bitsandbytes has stored in 4 bits by one NF4Matrix."""
    result = dict(tensors)
    if wrong := next((name for name in tensors if name.endswith("bitsandbytes__fp4")), None):
        raise CheckpointError(
            f"{wrong.partition('.quant_state')[0]} is stored in FP4, but Megalith reads only NF4 of bitsandbytes' "
            "4-bit types; use the unquantized model, or one with bnb_4bit_quant_type nf4"
        )
    for name in [name.removesuffix(STATE) for name in tensors if name.endswith(STATE)]:
        ends = {end: result.pop(f"{name}.{end}") for end in NF4_PARTS if f"{name}.{end}" in result}
        try:
            state = json.loads(bytes(result.pop(name + STATE).read().tolist()))
            shape, mean = tuple(state["shape"]), state.get("nested_offset")
            blocks = state["blocksize"], state.get("nested_blocksize", ABSMAX_BLOCK)
            absmaxes = math.prod(shape) // BLOCKS_OF["nf4"]
            counts = math.prod(tensors[name].shape), math.prod(ends["absmax"].shape)
            fits = (
                len(shape) == 2
                and shape[1] % BLOCKS_OF["nf4"] == 0
                and counts == (math.prod(shape) // 2, absmaxes)
            )
            if mean is not None:
                fits &= math.prod(ends["nested_absmax"].shape) == -(-absmaxes // ABSMAX_BLOCK)
                mean = float(mean)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"{name} has an incomplete bitsandbytes state ({error!r:.80}); fetch it again"
            ) from None
        if not fits or blocks != (BLOCKS_OF["nf4"], ABSMAX_BLOCK) or tensors[name].dtype != "U8":
            raise CheckpointError(
                f"{name} is {list(shape)} in NF4 with blocks of {blocks[0]} values and {blocks[1]} absmaxes; only "
                f"bitsandbytes' defaults are supported: uint8 storage, blocks of {BLOCKS_OF['nf4']} values within a "
                f"row, and {ABSMAX_BLOCK} absmaxes per block; use the model's original, unquantized folder"
            )
        result[name] = NF4Matrix({"": tensors[name], **ends}, shape, mean, dtype)
    return result


def unpack_quantized(tensors: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a folder's tensors, with quantized values and scales replaced by one dequantized tensor each.

    Args:
        tensors: the stored tensors by name.
        config: contents of config.json.
        dtype: safetensors dtype of the dequantized matrices.

    Raises:
        CheckpointError: shapes of values and scales do not match.
    """
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "mxfp4":
        return _with_mxfp4_experts(tensors)
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        return _with_nf4_matrices(tensors, dtype)
    if method == "compressed-tensors" and quantization.get("format") == "int-quantized":
        return _with_quantized_matrices(tensors, "int8", None, dtype)
    block = quantization.get("weight_block_size") if method == "fp8" else None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return _with_quantized_matrices(tensors, "fp8", block, dtype)
    return dict(tensors)


def _with_quantized_matrices(
    tensors: Mapping[str, Any], form: Form, block: list[int] | None, dtype: str
) -> dict[str, Any]:
    result, code = dict(tensors), DTYPE_CODES[CODES[form]]
    for name in [name for name, stored in tensors.items() if stored.dtype == code]:
        if (scales := result.pop(name + SUFFIX[form], None)) is None:
            continue  # rejected later because of its dtype
        shape, size = tensors[name].shape, block or [1, *tensors[name].shape[1:]]
        expected = tuple(math.ceil(one / each) for one, each in zip(shape, size))
        if len(shape) != 2 or scales.shape != expected or scales.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{name} is {list(shape)} of {code} and its scales {list(scales.shape)} of {scales.dtype}, but {form} "
                f"needs one scale for each {'row' if block is None else 'block of ' + str(block)} of a matrix; fetch "
                "it again, or use the original"
            )
        result[name] = QuantizedMatrix(tensors[name], scales, tuple(size), dtype)
    return result


def _with_mxfp4_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tensors)
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        if weight + SCALES not in tensors:
            continue  # reported later as an extra tensor
        blocks, scales = result.pop(name), result.pop(weight + SCALES)
        fits = len(blocks.shape) == 4 and blocks.shape[3] * 2 == SCALED_TOGETHER
        if not fits or blocks.shape[:3] != scales.shape or {blocks.dtype, scales.dtype} != {"U8"}:
            raise CheckpointError(
                f"{name} is {list(blocks.shape)} of {blocks.dtype} and its scales {list(scales.shape)} of "
                f"{scales.dtype}, but MXFP4 is uint8 [experts, out, in / 32, 16] and [experts, out, in / 32]; fetch it "
                "again"
            )
        result[weight] = MXFP4Experts(blocks, scales)
    return result
