"""Gradients summed by the GPUs' copy engines (direct.py), in the place of FSDP2's own reduce-scatter.

FSDP2 asks for the memory that it reduces from, casts and copies a layer's gradients into it, asks for memory for the
result, and hands both over on a stream of its own:

    allocate   memory that the other ranks can read, so that what FSDP2 copies in is all that is copied here
    the call   ranks meet; each fetches its part from every other and adds the parts up by rank

The additions are all that takes multiprocessors: 1 ms of a step of GPT-2-large on two H200 by arithmetic, where NCCL's
kernels hold 24 of the 132 for 31 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.direct import Slot, slots
from megalith.errors import TrainingError

SLOTS = 1  # FSDP2 lets a reduction end before it copies the next one's gradients
FETCHED_AT_ONCE = 2**28  # bytes: what is fetched waits for its sum in ordinary memory


class DirectReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes, for modules that are sharded over `group`."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._begun: tuple[Slot, Tensor] | None = None
        """A slot and the input in it, from FSDP2's first call of allocate until the reduction."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input's memory and, by the next call, the output's.

        For every reduction FSDP2 (foreach_reduce, torch 2.11 to 2.13) calls this for the input, on the stream on which
        it then copies gradients in, after that for the output, which becomes the gradient, and then reduces. The
        reduction checks that it was so.
        """
        if self._begun is not None:
            return torch.empty(size, dtype=dtype, device=device)
        like = torch.empty(size, dtype=dtype, device="meta")
        slot = slots(self._group.group_name, SLOTS).next(like.nbytes)
        slot.begin(torch.cuda.current_stream())
        self._begun = slot, slot.of(slot.rank, like.shape, dtype)
        return self._begun[1]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """output_tensor, [elements / ranks], becomes this rank's part of the sum of input_tensor, [elements], in the
        order of the ranks and in the tensors' dtype. On the current stream."""
        slot, given = self._begun or (None, None)
        self._begun = None
        alike = given is input_tensor and output_tensor.numel() * slot.ranks == given.numel()
        if not alike or op != dist.ReduceOp.SUM or async_op:
            raise TrainingError(
                f"torch {torch.__version__} asks for a reduce-scatter of gradients in another way than 2.11 to 2.13 "
                "do; leave dp out of parallel.symmetric_memory_groups"
            )
        wholes = [slot.of(rank, given.shape, given.dtype) for rank in range(slot.ranks)]
        parts = [whole.chunk(slot.ranks)[slot.rank] for whole in wholes]
        step = max(1, FETCHED_AT_ONCE // (slot.ranks - 1) // input_tensor.element_size())
        pieces = [part.split(step) for part in parts]
        stream = torch.cuda.current_stream()
        slot.meet(stream)
        for number, total in enumerate(output_tensor.split(step)):
            fetched = {slot.rank: pieces[slot.rank][number]}
            for peer in slot.peers:
                fetched[peer] = pieces[peer][number].clone()
            torch.add(fetched[0], fetched[1], out=total)
            for rank in range(2, slot.ranks):
                total += fetched[rank]
        slot.end(stream)
