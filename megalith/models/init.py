"""Initial weights that depend on the seed and the parameter's name alone.

A parameter is filled block by block of its flattened global tensor, each block by a generator of its own, seeded by a
hash of (seed, name, block). So no parameter's values depend on which others exist, on the order of creation, or on
the device, and any slice of a tensor can be made without the rest. A core makes 170 million values a second, so the
blocks of a tensor are made by as many threads as there are cores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local, local_shape_and_offset
from megalith.progress import Progress

BLOCK = 2**20  # elements that one generator fills
DRAWN_TOGETHER = 16  # normal values of torch's CPU generator: such a count depends on no later one


def initialize(model: nn.Module, config: ModelConfig, seed: int, show_progress: bool = False) -> None:
    """Fills every parameter: N(0, init_method_std), scaled by 1/√(2 · layers) where a layer adds to the residual
    stream; norms 1 or, where they are zero-centred, 0; biases and buffers 0; rows of the padded vocabulary 0. Adapters
    begin with B = 0 and A at N(0, 1 / (3 · in)), the variance that PEFT begins with, as a convolution's taps do. A
    gated delta net's decays begin at e^weight uniform between 0 and 16 and bias 1.

    A parameter may be plain or a DTensor of any placement: its local shard gets its slice of the global tensor.
    """
    total = sum(local(parameter).nbytes for parameter in model.parameters())
    with torch.no_grad(), Progress("initial weights", total, show=show_progress) as progress:
        for name, parameter in model.named_parameters():
            (shape, first), values = local_shape_and_offset(parameter), local(parameter)
            values.copy_(initial_value(name, parameter.shape, config, seed, shape, first))
            progress.add(values.nbytes)
        for buffer in model.buffers():
            buffer.zero_()


def initial_value(
    name: str,
    shape: torch.Size,
    config: ModelConfig,
    seed: int,
    slice_shape: Sequence[int] | None = None,
    slice_first: Sequence[int] | None = None,
) -> Tensor:
    """The float32 CPU tensor that parameter `name`, of this global shape, starts from.

    Or a slice of it: of `slice_shape`, from the indices `slice_first` on.
    """
    slice_shape = torch.Size(shape if slice_shape is None else slice_shape)
    slice_first = [0] * len(shape) if slice_first is None else slice_first
    if ".decay." in name:
        return _initial_decay(name, shape, seed, slice_first[0], slice_shape[0])
    if name.endswith(".bias"):
        return torch.zeros(slice_shape)
    if name.endswith("out_norm.weight"):
        return torch.ones(slice_shape)
    if ".lora_B." in name:
        return torch.zeros(slice_shape)
    if "layernorm" in name:
        return torch.full(slice_shape, 0.0 if config.layernorm_zero_centered_gamma else 1.0)
    std = config.init_method_std
    if ".lora_A." in name or name.endswith("conv.weight"):
        std = 1 / math.sqrt(3 * shape[-1])
    if name.endswith(("linear_proj.weight", "linear_out.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.depth(name))
    value = normal_rows(name, shape, std, seed, slice_first[0], slice_shape[0])
    for dim in range(1, len(shape)):
        value = value.narrow(dim, slice_first[dim], slice_shape[dim])
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        value[max(0, config.vocab_size - slice_first[0]) :] = 0.0
    return value


def _initial_decay(name: str, shape: torch.Size, seed: int, first: int, rows: int) -> Tensor:
    if name.endswith(".bias"):
        return torch.ones(rows)
    uniform = torch.special.ndtr(normal_rows(name, shape, 1.0, seed, first, rows))
    return (16 * uniform).clamp(min=0.01).log()


def normal_rows(name: str, shape: torch.Size, std: float, seed: int, first: int, rows: int) -> Tensor:
    """Rows of a tensor of this shape that is N(0, std) in float32, keyed by seed and name.

    Only the blocks that these rows touch are made, each from its start, as a generator gives its values in order.
    """
    total = shape.numel()
    width = shape[1:].numel()
    start, stop = first * width, (first + rows) * width
    flat = torch.empty(stop - start)

    def fill(block: int) -> None:
        origin = block * BLOCK
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        count = -(-min(BLOCK, total - origin) // DRAWN_TOGETHER) * DRAWN_TOGETHER
        if start <= origin and origin + count <= stop:
            flat[origin - start : origin - start + count].normal_(0.0, std, generator=generator)
        else:
            values = torch.empty(count).normal_(0.0, std, generator=generator)
            low, high = max(start, origin), min(stop, origin + BLOCK)
            flat[low - start : high - start] = values[low - origin : high - origin]

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    if len(blocks) == 1:  # which most tensors of a small model have: a thread takes longer to start
        fill(blocks[0])
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, blocks))
    return flat.view(rows, *shape[1:])
