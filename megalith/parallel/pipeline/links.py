"""Point-to-point transfers between the stages of a pipeline.

Each pair of neighbours has one communicator per direction and pass. NCCL processes the transfers of a communicator in
the order in which a rank posted them, and each transfer blocks the next ones until both ends have reached it. With one
communicator for several neighbours, or for both passes, schedules deadlock (tests/parallel/schedule_check.py shows
which). A communicator that carries one kind of tensor from one rank to one other rank cannot deadlock, because sender
and receiver follow the same order.

A sent tensor stays in memory until the transfer has finished. Nothing waits for that before the end of the step.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megalith.comm.collectives import Axis


class Links:
    """The links of this rank to its neighbouring stages. Creating them is collective over the world."""

    def __init__(self, axis: Axis, virtual: int):
        """Create the links. With `virtual` > 1 chunks per rank, the last rank is a neighbour of the first."""
        self._ranks = dist.get_process_group_ranks(axis.group)
        self._groups: dict[tuple[int, int, bool], ProcessGroup] = {}  # by sender and receiver, forward
        self._sending: deque[tuple[Work, Tensor]] = deque()
        # The distance between adjacent ranks of a pipeline is also the number of pipelines.
        spacing = self._ranks[1] - self._ranks[0]
        for pipeline in range(spacing):
            mine = pipeline == self._ranks[0]
            for stage in range(axis.size if virtual > 1 else axis.size - 1):
                following = (stage + 1) % axis.size
                for sender, receiver, forward in ((stage, following, True), (following, stage, False)):
                    group = dist.new_group([pipeline + spacing * sender, pipeline + spacing * receiver])
                    if mine and axis.rank in (sender, receiver):
                        self._groups[sender, receiver, forward] = group
        self._rank = axis.rank
        self._open(axis)

    def _open(self, axis: Axis) -> None:
        """Send one number over every link, in the same order on all ranks.

        NCCL creates a communicator at its first use, when both ends wait for each other. In a step, where receives are
        posted ahead, that could deadlock.
        """
        for (sender, receiver, _), group in self._groups.items():
            number = torch.zeros(1, device=axis.mesh.device_type)
            if axis.rank == sender:
                dist.send(number, self._ranks[receiver], group=group)
            else:
                dist.recv(number, self._ranks[sender], group=group)

    def send(self, tensor: Tensor, receiver: int, forward: bool) -> None:
        """Start sending `tensor` to pipeline rank `receiver`. Do not write to it before `wait_sends`."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        group = self._groups[self._rank, receiver, forward]
        tensor = tensor.contiguous()
        self._sending.append((dist.isend(tensor, self._ranks[receiver], group=group), tensor))

    def recv(self, tensor: Tensor, sender: int, forward: bool) -> Work:
        """Start receiving the next tensor of pipeline rank `sender` into `tensor`."""
        return dist.irecv(tensor, self._ranks[sender], group=self._groups[sender, self._rank, forward])

    def wait_sends(self) -> None:
        """Wait for all sends."""
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()
