"""The memory that a run on one device is expected to take, from the configuration alone.

Weights, gradients and optimizer state are exact: so many bytes a parameter. Activations are an estimate, the
tensors that the backward pass must find again (after Korthikanti et al., 2022, section 4), under assumptions:

- nothing is recomputed and nothing is offloaded;
- attention runs in a fused kernel, so the matrix of probabilities is never whole;
- dropout masks are computed again rather than kept;
- the loss takes the logits a chunk at a time (ops/cross_entropy.py), at most 2^26 of them;
- the allocator's fragments, the libraries' workspaces and the CUDA context (about 1 GB) come on top.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalith.models.flops import count_parameters

if TYPE_CHECKING:
    from megalith.config import ModelConfig

MASTER_BYTES = 4  # fp32 weights
GRADIENT_BYTES = 4  # fp32 gradients
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4}  # fp32 moments, or momentum
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights: int
    """fp32."""
    compute_copy: int
    """The weights in bf16 or fp16; 0 in fp32."""
    gradients: int
    optimizer: int
    activations: int
    """Of one micro-batch."""

    @property
    def total(self) -> int:
        return self.weights + self.compute_copy + self.gradients + self.optimizer + self.activations


def expected_memory(
    model: ModelConfig,
    micro_batch_size: int,
    seq_length: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> MemoryEstimate:
    """Peak memory of a training step on one device, in bytes.

    `precision` is fp32, bf16 or fp16, `optimizer` adamw, adam or sgd.
    """
    parameters = count_parameters(model).total
    tokens = micro_batch_size * seq_length
    width = COMPUTE_BYTES[precision]
    logits = min(tokens * model.padded_vocab_size, LOGITS_AT_ONCE)
    return MemoryEstimate(
        weights=MASTER_BYTES * parameters,
        compute_copy=0 if precision == "fp32" else width * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=OPTIMIZER_BYTES[optimizer] * parameters,
        activations=width * tokens * activations_per_token(model) + (4 + 2 * width) * logits,
    )


def activations_per_token(model: ModelConfig) -> int:
    """Elements that the backward pass keeps of each token, over all layers, in the compute dtype."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = 2 * model.query_groups * model.head_dim
    attention = 2 * hidden + query + key_value + query  # norm's input and output; q, k, v; attention's output
    if model.qk_layernorm:
        attention += query + key_value // 2  # the norms' inputs
    mlp = (
        2 * hidden + (3 if model.swiglu else 2) * model.ffn_size
    )  # norm's input and output; up, its activation
    return model.num_layers * (attention + mlp) + 3 * hidden  # last norm's input and output; its gradient
