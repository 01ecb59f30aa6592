"""Proof that a schedule is right: complete, in order, within its memory, and free of deadlock.

Deadlock is looked for under the strictest rules that a network is known to follow (NCCL): every rank has one queue of
transfers for each communicator; a transfer takes place when it stands at the head of both its queues, and blocks all
behind it until then. A rank's computing waits for what it receives, not for what it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from megalith.parallel.pipeline.schedules import Action, Kind, Schedule, StageIndex, in_flight_bound

# The communicator of a transfer, from its sender, its receiver and whether it is a forward pass's.
Communicator = Callable[[int, int, bool], Hashable]


def one_per_link(sender: int, receiver: int, forward: bool) -> Hashable:
    """What the executor does: a communicator for each pair of neighbours, direction, and pass."""
    return sender, receiver, forward


def one_per_pass(sender: int, receiver: int, forward: bool) -> Hashable:
    """One for all activations and one for all their gradients."""
    return forward


def one_for_all(sender: int, receiver: int, forward: bool) -> Hashable:
    return None


def violations(
    schedule: Schedule, communicator: Communicator = one_per_link, wait_for_sends: bool = False
) -> list[str]:
    """What is wrong with the schedule, in sentences; empty when it is right.

    `wait_for_sends` makes a rank wait until each of its transfers has been taken, as blocking sends do.
    """
    results = [text for rank in range(schedule.stages) for text in _of_rank(schedule, rank)]
    return results or _deadlock(schedule, communicator, wait_for_sends)


def peak_in_flight(actions: list[Action]) -> int:
    """The most (micro-batch, chunk) that have gone forward and not yet wholly backward."""
    held = peak = 0
    for action in actions:
        held += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
        peak = max(peak, held)
    return peak


_COMPLETE = (
    [Kind.FORWARD, Kind.BACKWARD],
    [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT],
    [Kind.FORWARD],  # where there is no training
)


def _of_rank(schedule: Schedule, rank: int) -> list[str]:
    actions = schedule.actions[rank]
    done: dict[tuple[int, int], list[Kind]] = {
        (m, c): [] for m in range(schedule.micro_batches) for c in range(schedule.virtual)
    }
    strange = [action for action in actions if (action.micro_batch, action.chunk) not in done]
    if strange:
        return [f"rank {rank}: {strange[0]} is of no micro-batch or chunk of this schedule"]
    for action in actions:
        done[action.micro_batch, action.chunk].append(action.kind)
    allowed = _COMPLETE[2:] if schedule.kind == "forward" else _COMPLETE[:2]
    results = [
        f"rank {rank}: micro-batch {m} of chunk {c} has {[kind.value for kind in kinds]}"
        for (m, c), kinds in done.items()
        if kinds not in allowed
    ]
    peak, bound = peak_in_flight(actions), in_flight_bound(schedule, rank)
    if peak > bound:
        results.append(f"rank {rank} holds {peak} micro-batches at a time, more than {bound}")
    return results


class _Transfer(NamedTuple):
    forward: bool
    micro_batch: int
    sender: StageIndex
    receiver: StageIndex


def _transfers(schedule: Schedule, rank: int, action: Action) -> tuple[list[_Transfer], list[_Transfer]]:
    """What an action receives before it and sends after it."""
    forward, here = action.kind is Kind.FORWARD, StageIndex(rank, action.chunk)
    source, target = schedule.source(rank, action), schedule.target(rank, action)
    received = [_Transfer(forward, action.micro_batch, source, here)] if source else []
    sent = [_Transfer(forward, action.micro_batch, here, target)] if target else []
    return received, sent


def _deadlock(schedule: Schedule, communicator: Communicator, wait_for_sends: bool) -> list[str]:
    """Runs the schedule step by step; names the ranks that are stuck when nothing can move."""
    ranks = range(schedule.stages)
    queues: dict[tuple[int, Hashable], deque[_Transfer]] = {}  # by rank and communicator
    waiting: list[set[_Transfer]] = [set() for _ in ranks]  # what each rank's next step needs
    position = [0] * schedule.stages
    posted = [False] * schedule.stages  # whether the receives of the action at `position` stand in the queue

    def post(rank: int, transfer: _Transfer) -> None:
        name = communicator(transfer.sender.rank, transfer.receiver.rank, transfer.forward)
        queues.setdefault((rank, name), deque()).append(transfer)

    def advance(rank: int) -> bool:
        if position[rank] == len(schedule.actions[rank]) or waiting[rank]:
            return False
        received, sent = _transfers(schedule, rank, schedule.actions[rank][position[rank]])
        if not posted[rank]:
            posted[rank] = True
            for transfer in received:
                post(rank, transfer)
                waiting[rank].add(transfer)
            return True
        for transfer in sent:
            post(rank, transfer)
            if wait_for_sends:
                waiting[rank].add(transfer)
        position[rank], posted[rank] = position[rank] + 1, False
        return True

    def transfer_heads() -> bool:
        moved = False
        for (rank, name), queue in queues.items():
            while queue and queue[0].sender.rank == rank:
                transfer = queue[0]
                opposite = queues.get((transfer.receiver.rank, name))
                if not opposite or opposite[0] != transfer:
                    break
                queue.popleft()
                opposite.popleft()
                for end in (transfer.sender.rank, transfer.receiver.rank):
                    waiting[end].discard(transfer)
                moved = True
        return moved

    while any([advance(rank) for rank in ranks]) or transfer_heads():
        pass
    return [
        f"rank {rank} is stuck at {schedule.actions[rank][position[rank]]}"
        for rank in ranks
        if position[rank] < len(schedule.actions[rank])
    ] or [f"rank {rank} has transfers that nobody takes" for (rank, _), queue in queues.items() if queue]
