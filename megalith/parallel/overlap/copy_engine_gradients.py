"""Gradients reduced by the GPUs' copy engines (copy_engine.py): all-reduce of replicas, and FSDP2's reduce-scatter.

Replicas copy a layer's gradients into symmetric memory and synchronize; each rank fetches its shard from every other
and adds in fp32; they synchronize again, each fetches the other reduced shards, and copies it all back.

FSDP2 allocates the memory that it reduces from, casts and copies a layer's gradients into it, allocates memory for the
result, and calls the reduction on a stream of its own:

    allocate   symmetric memory, so that what FSDP2 copies in needs no further copy
    the call   ranks synchronize; each fetches its shard from every other and adds them in the order of ranks

Only the additions, and replicas' two copies, take SMs: 1 ms of a step of GPT-2-large on two H200 by arithmetic, and 4
with the copies, where NCCL's kernels take 24 of the 132 SMs for 31 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.comm.copy_engine import Slot, slots
from megalith.errors import TrainingError

SLOTS = 1  # a reduction ends before the next one's gradients are copied
FETCHED_AT_ONCE = 2**28  # bytes: what is fetched waits for its sum in ordinary memory


class CopyEngineAllReduce:
    """Gradients on their way to be summed over the ranks of a group, in place. All ranks give the same shapes."""

    def __init__(self, gradients: Sequence[Tensor], group: ProcessGroup):
        """Begins; `gradients`, of one dtype, are what the current stream makes of them, and its until `wait`."""
        sizes, dtype = [gradient.numel() for gradient in gradients], gradients[0].dtype
        slot = slots(group.group_name, SLOTS).next(sum(sizes) * dtype.itemsize)
        stream = _stream(gradients[0].device.index)
        slot.follow(torch.cuda.current_stream(), stream)
        with torch.cuda.stream(stream):
            slot.begin(stream)
            wholes = [slot.of(rank, torch.Size([sum(sizes)]), dtype) for rank in range(slot.ranks)]
            given, parts = wholes[slot.rank], [whole.tensor_split(slot.ranks) for whole in wholes]
            copies = [part.view_as(gradient) for part, gradient in zip(given.split(sizes), gradients)]
            torch._foreach_copy_(copies, list(gradients))
            slot.synchronize(stream)
            for peer in slot.peers:
                for total, part in _chunks(slot, parts[slot.rank][slot.rank], parts[peer][slot.rank]):
                    total += part.clone()
            slot.synchronize(stream)
            for peer in slot.peers:  # who has fetched this part of what was given
                parts[slot.rank][peer].copy_(parts[peer][peer])
            torch._foreach_copy_(list(gradients), copies)
            self._done = slot.end(stream)

    def wait(self) -> None:
        """The current stream goes on when the gradients are the sums."""
        torch.cuda.current_stream().wait_event(self._done)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Of sums alone: other collectives, which a layer waits for sooner, stand in copy_engine.py's."""
    return torch.cuda.Stream(device, priority=-1)


def _chunks(slot: Slot, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Alike tensors, piece by piece, so that what is fetched of all ranks at once stays small."""
    step = max(1, FETCHED_AT_ONCE // (slot.ranks - 1) // tensors[0].element_size())
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


class CopyEngineReduceScatter:
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
        stream = torch.cuda.current_stream()
        slot.synchronize(stream)
        for total, *chunks in _chunks(slot, output_tensor, *parts):
            fetched = {slot.rank: chunks[slot.rank]}
            for peer in slot.peers:
                fetched[peer] = chunks[peer].clone()
            torch.add(fetched[0], fetched[1], out=total)
            for rank in range(2, slot.ranks):
                total += fetched[rank]
        slot.end(stream)
