"""Initial weights that depend on the seed and the parameter's name alone.

A parameter is filled block by block of its flattened global tensor, each block by a generator of its own, seeded by a
hash of (seed, name, block). So no parameter's values depend on which others exist, on the order of creation, or on
the device, and any slice of a tensor can be made without the rest.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig

BLOCK = 2**20  # elements that one generator fills


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fills every parameter: N(0, init_method_std), scaled by 1/√(2 · layers) where a layer adds to the residual
    stream; norms 1, biases 0; rows of the padded vocabulary 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, config, seed))


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The float32 CPU tensor that parameter `name` starts from."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    std = config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.num_layers)
    value = normal(name, shape, std, seed)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        value[config.vocab_size :] = 0.0
    return value


def normal(name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """N(0, std) in float32, keyed by seed and name."""
    flat = torch.empty(shape.numel())
    for block, values in enumerate(flat.split(BLOCK)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values.normal_(0.0, std, generator=generator)
    return flat.view(shape)
