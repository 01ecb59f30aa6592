"""Memory traffic of LoRA adapters and of a quantized base in a layer.

Adapters' matmuls are too narrow to be limited by FLOPs, so this decides their time.
"""

from __future__ import annotations

import math

from megalith.planner.counts import MetaModel

# Bytes per weight to decode a quantized base, at the bandwidth of elementwise kernels: nf4 is fitted to call E of
# RESULTS.md, the others are the bytes that are read and written.
DECODING = {"nf4": 10.3, "mxfp4": 2.5, "fp8": 3.0, "int8": 3.0}


def adapter_elements(meta: MetaModel, number: int, topk: int | None) -> tuple[int, int]:
    """Return the elements per token that adapters read and write in a layer's forward and backward pass.

    A forward pass reads x for A, writes B · A · x, and adds it to the linear's output. A backward pass scales the
    output's gradient, multiplies it by B and by A · x, multiplies x by the result, and adds A's gradient of x.

    Args:
        meta: the model on the meta device, with adapters.
        number: index of the layer.
        topk: number of experts that a token uses.
    """
    forward = backward = 0
    for is_a, (rows, columns, experts, *_) in meta.adapter_matrices(number):
        times = (topk or 1) if experts else 1
        forward += times * (columns if is_a else 4 * rows)
        backward += times * (5 * columns if is_a else 4 * rows)
    return forward, backward


def decoded_bytes(meta: MetaModel, number: int, form: str) -> float:
    """Return the bytes that are moved to dequantize a layer's weights once."""
    return sum(DECODING[form] * math.prod(shape) for shape in meta.base_matrices(number))
