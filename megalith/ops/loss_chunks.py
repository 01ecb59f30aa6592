"""Losses that compute their logits in chunks of tokens: chunk sizes and gradient accumulation."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits per chunk. On an H200 the GEMMs of 3,328 tokens with GPT-2's vocabulary use all SMs; with 2,560 tokens the
# gradient's takes a quarter longer.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 5 * 2**25}
# Large vocabularies use a gigabyte in bf16, because each chunk reads and writes the head's fp32 wgrad. For Llama-3-8B's
# 128,256 entries, chunks of 4,096 tokens save 8 ms per step of 16,384 tokens compared with chunks of 1,280.
LARGE_VOCABULARY, LARGE_CHUNK = 2**16, 2**29
CHUNK_MULTIPLE = 256  # tokens; faster for matmuls


def loss_chunk_tokens(rows: int, device_type: str = "cuda") -> int:
    """Return the number of tokens per chunk if each token has `rows` logits."""
    large = device_type == "cuda" and rows > LARGE_VOCABULARY
    tokens = (LARGE_CHUNK if large else CHUNK_ELEMENTS[device_type]) // rows
    return max(1, tokens - tokens % CHUNK_MULTIPLE if tokens > CHUNK_MULTIPLE else tokens)


class HeadGradients:
    """Gradients of the output matrix, its bias and its input, collected chunk by chunk."""

    def __init__(self, weight: Tensor, bias: Tensor | None, has_wgrad: bool):
        """Allocate zero gradients for `weight` [rows, hidden], unless it is frozen, and for `bias` [rows], if there
        is one.
        """
        self.inputs: list[Tensor] = []
        """Gradients of the chunks' inputs, [tokens, hidden] each, in the order of `add`."""
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if has_wgrad else None
        self.bias = None if bias is None else torch.zeros_like(bias)

    def add(self, grad: Tensor, x: Tensor, matrix: Tensor) -> None:
        """Accumulate the gradients of a chunk whose logits x · matrixᵀ have the gradient `grad` [tokens, rows].

        `matrix` is the weight in x's dtype.
        """
        self.inputs.append(grad @ matrix)
        if self.weight is not None:
            self.weight = _add_matmul(self.weight, grad.T, x)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=torch.float32)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a · b to total, float32.

    On a GPU the matmul accumulates directly, without rounding to the dtype of a and b.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(a @ b)
