"""A quantized frozen base (`lora.quantize_base`): replaces the weights of this rank's linears and experts.

Tensor, expert and pipeline parallelism shard quantized weights like ordinary ones. Data parallelism does not: each
data-parallel rank has a full copy, because FSDP2 shards only parameters, and quantized weights are buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megalith.config import LoraConfig
from megalith.errors import ConfigError
from megalith.local_shards import local_shape_and_offset
from megalith.models.adapters import ADAPTER
from megalith.models.coded_weight import CodedWeight
from megalith.models.linear import Linear
from megalith.models.moe import GroupedLinear
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.weight_codes import BLOCK


def base_matrices(model: Transformer) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yield (name, module) of the linears and experts that `lora.quantize_base` quantizes.

    It does not quantize embeddings, the output matrix, routers, norms and convolutions.
    """
    for layer_name, layer in layers_of(model).items():
        for name, module in layer.named_modules():
            if is_base_matrix(name, module):
                yield f"{layer_name}.{name}", module


def is_base_matrix(name: str, module: nn.Module) -> bool:
    """Return True if `lora.quantize_base` quantizes a module of a layer. `name` is the module's path in the layer."""
    is_matrix = isinstance(module, Linear | GroupedLinear) and ADAPTER not in f".{name}."
    return is_matrix and name.rpartition(".")[2].startswith("linear_")


def coded_weights(model: nn.Module) -> dict[str, CodedWeight]:
    """Return the chunk's quantized weights, by the name of the parameter that each replaces."""
    named = model.named_modules()
    return {
        f"{name.removesuffix('.coded')}.weight": each for name, each in named if isinstance(each, CodedWeight)
    }


@dataclass(frozen=True)
class CodedShard:
    """This rank's shard of a quantized weight, with the attributes of LocalShard. Each access to `values`
    dequantizes it.
    """

    weight: CodedWeight
    owned: bool = True  # also by the ranks with the same shard

    @property
    def values(self) -> Tensor:
        return self.weight.all_rows()

    @property
    def offset(self) -> tuple[int, ...]:
        return self.weight.offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


def coded_shards(chunks: Iterable[nn.Module]) -> dict[str, CodedShard]:
    """Return this rank's shards of the quantized weights, by the name of the parameter that each replaces."""
    return {name: CodedShard(each) for chunk in chunks for name, each in coded_weights(chunk).items()}


def apply_coded_base(chunk: Transformer, lora: LoraConfig) -> None:
    """Replace the frozen weights of the chunk's linears and experts by empty quantized ones, in place.

    Call it after tensor and expert parallelism have sharded the weights. `bridge/quantize_base.py` fills them.

    Raises:
        ConfigError: sharding would split a block of values that share a scale.
    """
    if not lora.has_quantized_base:
        return
    form = lora.quantize_base
    block = BLOCK.get(form, 1)
    for name, module in base_matrices(chunk):
        shape, offset = local_shape_and_offset(module.weight)
        if shape[-1] % block or offset[-1] % block:
            full = module.weight.shape[-1]
            divided = "" if full == shape[-1] else f", of which a tensor-parallel rank has {shape[-1]}"
            raise ConfigError(
                f"lora.quantize_base {form} has one scale for {block} consecutive values of a "
                f"row, but {name} has {full} columns{divided}; choose int8 or fp8"
                f"{', or a smaller tensor_model_parallel_size' if divided else ''}"
            )
        module.keep_in_codes(CodedWeight(form, module.weight.shape, shape, offset, chunk.compute_dtype))
