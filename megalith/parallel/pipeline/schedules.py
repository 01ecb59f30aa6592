"""Pipeline schedules as data: each rank's order of actions on micro-batches.

The layers are cut into stages, one per rank, or with interleaving `virtual` per rank. A micro-batch goes forward
through all stages and backward through them again, so the last rank waits for work at the start of a step, and the
first at its end: the bubble. A schedule orders each rank's work to keep the bubble and the activations that wait for
their backward pass small. Nothing here runs anything: the executor (executor.py), the simulator (simulate.py), the
drawings (report/pipeline_drawing.py) and the tests' checker (schedule_check.py) all read the same lists.

- `1f1b` (Narayanan et al. 2019; Fan et al. 2021): after a warm-up, one forward, one backward.
- `interleaved` (Narayanan et al. 2021): each rank holds several chunks of layers, one from each lap around the ranks,
  which divides the bubble by their number and multiplies the transfers by it. Micro-batches go through the chunks in
  groups. The smallest group has as many micro-batches as there are ranks: a micro-batch is then back from its lap just
  when the rank needs it for its next chunk. Larger groups leave time for the transfer, but hold more activations
  (breadth-first, Lamy-Poirier 2023).
- `zero_bubble` (ZB-H1; Qi et al. 2023): the backward pass is split. dgrad goes to the stage before at once; wgrad,
which no rank waits for, fills the bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megalith.errors import ConfigError


class Kind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"  # dgrad and wgrad together
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"


class Action(NamedTuple):
    """One kind of work on one micro-batch in one of a rank's chunks of layers."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


class StageIndex(NamedTuple):
    """A stage of the model: chunk `chunk` of rank `rank`. Stages are counted chunk · ranks + rank."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order."""

    kind: str
    stages: int
    """Number of pipeline ranks."""
    micro_batches: int
    virtual: int
    """Number of chunks of layers on each rank."""
    group: int
    """Number of micro-batches that go through a chunk before the next chunk's turn."""
    actions: list[list[Action]]
    """The actions in order, by rank."""

    def source(self, rank: int, action: Action) -> StageIndex | None:
        """Return the stage that sends this action's input (activations or gradients), or None if it needs no
        transfer."""
        return neighbour(self, rank, action, {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1})

    def target(self, rank: int, action: Action) -> StageIndex | None:
        """Return the stage that receives this action's output, or None if it needs no transfer."""
        return neighbour(self, rank, action, {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1})


def neighbour(schedule: Schedule, rank: int, action: Action, steps: dict[Kind, int]) -> StageIndex | None:
    """Return the stage `steps[kind]` stages ahead. None if there is none, or if `kind` is not in `steps`."""
    if action.kind not in steps:
        return None
    stage = action.chunk * schedule.stages + rank + steps[action.kind]
    if not 0 <= stage < schedule.stages * schedule.virtual:
        return None
    return StageIndex(stage % schedule.stages, stage // schedule.stages)


def build_schedule(
    kind: str, stages: int, micro_batches: int, virtual: int = 1, group: int | None = None
) -> Schedule:
    """Build a schedule.

    Args:
        kind: a key of SCHEDULES.
        stages: number of pipeline ranks.
        micro_batches: micro-batches per step.
        virtual: chunks of layers per rank.
        group: for `interleaved`, number of micro-batches that go through a chunk before the next chunk's turn.
            Default: `stages`.

    Raises:
        ConfigError: the schedule does not support these sizes. The message names sizes that it does.
    """
    check_schedule(kind, stages, micro_batches, virtual, group)
    group = group or stages
    order = SCHEDULES[kind]
    actions = [order(rank, stages, micro_batches, virtual, group) for rank in range(stages)]
    return Schedule(kind, stages, micro_batches, virtual, group, actions)


def check_schedule(kind: str, stages: int, micro_batches: int, virtual: int, group: int | None) -> None:
    """Raise the ConfigError that `build_schedule` would raise for these arguments, without building the schedule."""
    if kind not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule is {kind!r}; choose one of {', '.join(SCHEDULES)}")
    for name, value in (
        ("pipeline_model_parallel_size", stages),
        ("the number of micro-batches", micro_batches),
        ("virtual_pipeline_model_parallel_size", virtual),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if kind == "interleaved":
        _check_interleaved(stages, micro_batches, virtual, group)
    elif group is not None:
        raise ConfigError(
            f"microbatch_group_size_per_virtual_pipeline_stage is {group}, but pipeline_schedule {kind} has one "
            "chunk of layers on each rank; set virtual_pipeline_model_parallel_size, or leave "
            "microbatch_group_size_per_virtual_pipeline_stage out"
        )
    elif virtual > 1:
        raise ConfigError(
            f"pipeline_schedule {kind} has one chunk of layers on each rank, but "
            f"virtual_pipeline_model_parallel_size is {virtual}; set virtual_pipeline_model_parallel_size to 1, or "
            "pipeline_schedule to interleaved"
        )


def fitting_micro_batches(kind: str, stages: int, micro_batches: int, group: int | None) -> int:
    """Return the smallest number of micro-batches, at least `micro_batches`, that the schedule supports."""
    if kind != "interleaved":
        return micro_batches
    if group is None:
        return -(-micro_batches // stages) * stages
    last = micro_batches % group
    return micro_batches + (stages - last if 0 < last < stages else 0)


def build_forward_schedule(stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Build a schedule of forward passes only, for evaluation and generation, with any number of micro-batches."""
    order = _interleaved_order(micro_batches, virtual, stages)
    actions = [[Action(Kind.FORWARD, *item) for item in order] for _ in range(stages)]
    return Schedule("forward", stages, micro_batches, virtual, stages, actions)


def in_flight_bound(schedule: Schedule, rank: int) -> int:
    """Return an upper bound on the number of (micro-batch, chunk) pairs whose activations `rank` holds at the same
    time.
    """
    stages, micro_batches, virtual = schedule.stages, schedule.micro_batches, schedule.virtual
    match schedule.kind:
        case "1f1b":
            return min(micro_batches, stages - rank)
        case "zero_bubble":  # on every rank as much as 1F1B on its first
            return min(micro_batches, stages)
        case "interleaved":
            return min(
                micro_batches * virtual, _interleaved_warm_up(rank, stages, virtual, schedule.group) + 1
            )
        case "forward":  # forward passes keep no activations
            return micro_batches * virtual


def _check_interleaved(stages: int, micro_batches: int, virtual: int, group: int | None) -> None:
    if virtual == 1 or stages == 1:
        raise ConfigError(
            f"pipeline_schedule interleaved puts several chunks of layers on each of several ranks, but "
            f"pipeline_model_parallel_size is {stages} and virtual_pipeline_model_parallel_size {virtual}; raise both "
            "to 2 or more, or set pipeline_schedule to 1f1b"
        )
    if group is not None and (group < stages or 0 < micro_batches % group < stages):
        fitting = [size for size in range(stages, micro_batches + 1) if not 0 < micro_batches % size < stages]
        raise ConfigError(
            f"microbatch_group_size_per_virtual_pipeline_stage is {group} for {micro_batches} micro-batches per step "
            f"and pipeline_model_parallel_size {stages}, but every group, the last one too, needs at least as many "
            f"micro-batches as there are stages; leave it out{' or set it to ' if fitting else ''}"
            f"{' or '.join(map(str, fitting))}"
        )
    if group is None and micro_batches % stages:
        lower, upper = micro_batches // stages * stages, -(-micro_batches // stages) * stages
        counts = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"{micro_batches} micro-batches per step are not divisible by "
            f"pipeline_model_parallel_size {stages}, as pipeline_schedule interleaved needs; "
            f"change global_batch_size so that there are {counts}, or leave "
            "virtual_pipeline_model_parallel_size out (1f1b supports any number)"
        )


def _1f1b(rank: int, stages: int, micro_batches: int, virtual: int, group: int) -> list[Action]:
    """Order one rank's actions: forward passes until the first gradient can arrive, then one forward and one backward
    pass in turn.
    """
    order = [Action(Kind.FORWARD, m) for m in range(micro_batches)]
    back = [Action(Kind.BACKWARD, m) for m in range(micro_batches)]
    return _one_forward_one_backward(order, back, warm_up=stages - 1 - rank)


def _interleaved(rank: int, stages: int, micro_batches: int, virtual: int, group: int) -> list[Action]:
    """Order (micro-batch, chunk) pairs as in 1F1B: `group` micro-batches go through a chunk, then through the next
    one."""
    order = _interleaved_order(micro_batches, virtual, group)
    forward = [Action(Kind.FORWARD, m, c) for m, c in order]
    backward = [Action(Kind.BACKWARD, m, virtual - 1 - c) for m, c in order]
    return _one_forward_one_backward(forward, backward, _interleaved_warm_up(rank, stages, virtual, group))


def _interleaved_order(micro_batches: int, virtual: int, group: int) -> list[tuple[int, int]]:
    return [
        (m, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(virtual)
        for m in range(first, min(first + group, micro_batches))
    ]


def _interleaved_warm_up(rank: int, stages: int, virtual: int, group: int) -> int:
    return 2 * (stages - 1 - rank) + (virtual - 1) * group


def _one_forward_one_backward(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    warm_up = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[warm_up:], backward) for action in pair]
    return forward[:warm_up] + steady + backward[len(forward) - warm_up :]


def _zero_bubble(rank: int, stages: int, micro_batches: int, virtual: int, group: int) -> list[Action]:
    """Order actions as in 1F1B, with each wgrad delayed by as many micro-batches as the stage's rank.

    Later ranks start later: they compute first what other ranks wait for, and have wgrads left for the end.
    """
    actions = []
    for action in _1f1b(rank, stages, micro_batches, virtual, group):
        if action.kind is Kind.FORWARD:
            actions.append(action)
            continue
        actions.append(Action(Kind.BACKWARD_INPUT, action.micro_batch))
        if action.micro_batch >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, action.micro_batch - rank))
    done = max(0, micro_batches - rank)
    return actions + [Action(Kind.BACKWARD_WEIGHT, m) for m in range(done, micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int, int, int], list[Action]]] = {
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
