"""Adapter slots: several adapters of one frozen base in one batch. Each sequence selects its adapter.

    y = x · Wᵀ + bias + x · Aᵢᵀ · Bᵢᵀ        i: slot of the sequence's adapter, 0 for none

The matmul with W is computed once for the whole batch, and A and B are gathered per sequence (Chen et al. 2023, Sheng
et al. 2023). A site is a matrix with adapters. It holds the adapters of all slots in two tensors whose storage stays in
place, so CUDA graphs remain valid when a slot is filled. B is already multiplied by the adapter's scale, and its rows
are ordered like the rows of the matrix. Adapters of a smaller rank are padded with zeros, and slot 0 is all zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megalith.local_shards import local
from megalith.models.linear import Linear
from megalith.models.moe import GroupedLinear
from megalith.models.pass_context import Context
from megalith.models.transformer import Transformer
from megalith.ops.gathered_gemm import gathered_linear
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups

MAX_GATHERED_ROWS = 2048  # rows of experts above which slots are computed one after the other

Reduce = Callable[[Tensor, Context], Tensor]


class AdapterSlots(nn.Module):
    """The adapters of one matrix: A [slots + 1, rank, in] and B [slots + 1, out, rank]."""

    rescales = False

    def __init__(self, slots: int, rank: int, weight: Tensor, rows: int, dtype: torch.dtype, reduce: Reduce):
        """Create empty slots.

        Args:
            slots: number of adapters.
            rank: largest rank of an adapter.
            weight: this rank's shard of the matrix.
            rows: number of the shard's rows that this rank uses.
            dtype: dtype of A and B.
            reduce: sums x · Aᵀ over the tensor-parallel ranks, if they have different columns of A.
        """
        super().__init__()
        experts, columns, device = weight.shape[:-2], weight.shape[-1], weight.device
        sizes = {"A": (rank, columns), "B": (rows, rank)}
        for half, size in sizes.items():
            values = torch.zeros(slots + 1, *experts, *size, dtype=dtype, device=device)
            self.register_buffer(f"lora_{half}", values, persistent=False)
        self.reduce = reduce

    @torch.no_grad()
    def fill(self, slot: int, a: Tensor | None, b: Tensor | None) -> None:
        """Fill a slot with this rank's shards of an adapter's A and B, or clear the slot if both are None."""
        self.lora_A[slot].zero_()
        self.lora_B[slot].zero_()
        if a is not None:
            self.lora_A[slot][..., : a.shape[-2], :].copy_(a)
            self.lora_B[slot][..., : b.shape[-1]].copy_(b)


class LinearSlots(AdapterSlots):
    """The adapters of a Linear, one per slot. Each row of a batch uses one of them."""

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(context.batch, -1, x.shape[-1])
        low = gathered_linear(rows, self.lora_A, context.adapters)  # [batch, tokens, rank]
        low = self.reduce(low, context)
        return gathered_linear(low, self.lora_B, context.adapters).view(*x.shape[:-1], -1)


class ExpertSlots(AdapterSlots):
    """The adapters of a GroupedLinear: A [slots + 1, experts, rank, in] and B [slots + 1, experts, out, rank]."""

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:  # [rows, in] -> [rows, out], sorted by expert
        adapters = groups.adapters
        if len(x) <= MAX_GATHERED_ROWS:
            experts = groups.group_of_rows(len(x))
            low = gathered_linear(x, self.lora_A, adapters, experts)  # [rows, rank]
            return gathered_linear(low, self.lora_B, adapters, experts)
        gemm, y = GroupedGemm(x.is_cuda), x.new_zeros(len(x), self.lora_B.shape[-2])
        for slot in range(1, len(self.lora_A)):
            low = gemm.forward(x, self.lora_A[slot], groups)
            y = torch.where(adapters[:, None] == slot, gemm.forward(low, self.lora_B[slot], groups), y)
        return y


def add_adapter_slots(
    model: Transformer,
    slots: int,
    ranks: Mapping[str, int],
    dtype: torch.dtype,
    reduces: Mapping[str, Reduce],
) -> dict[str, AdapterSlots]:
    """Add empty slots to matrices of a model, in place.

    Args:
        model: this rank's part of a model without adapters.
        slots: number of adapters.
        ranks: largest rank by the name of the matrix.
        dtype: dtype of A and B.
        reduces: the `reduce` function of each row-parallel matrix, by the matrix's name.

    Returns:
        The slots by the name of the matrix.
    """
    added = {}
    for name, rank in ranks.items():
        linear: Linear | GroupedLinear = model.get_submodule(name)
        weight, kind = local(linear.weight), LinearSlots if isinstance(linear, Linear) else ExpertSlots
        rows = len(linear.rows(weight)) if isinstance(linear, Linear) else weight.shape[-2]
        reduce = reduces.get(name, _unreduced)
        linear.adapter = added[name] = kind(slots, rank, weight, rows, dtype, reduce)
    return added


def _unreduced(x: Tensor, context: Context) -> Tensor:
    return x
