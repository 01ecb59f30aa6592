"""The rules of overlap: ping-pong micro-batches (with context parallelism alone only attention) and copy engines."""

from __future__ import annotations

from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_overlap(config: RunConfig) -> None:
    """Raises ConfigError unless, with tp_comm_overlap, micro-batches have two halves and something that one can hide of
    the other."""
    parallel, size = config.parallel, config.train.micro_batch_size
    if not parallel.tp_comm_overlap:
        return
    exchanges = parallel.context_parallel_size > 1 and parallel.cp_comm_type in ("a2a", "a2a+p2p")
    if parallel.tensor_model_parallel_size == 1 and not exchanges:
        raise ConfigError(
            "parallel.tp_comm_overlap hides collectives of tensor parallelism, and a2a of context parallelism, but "
            f"tensor_model_parallel_size is 1, and context_parallel_size {parallel.context_parallel_size} with "
            f"cp_comm_type {parallel.cp_comm_type} has none; leave it out, or set cp_comm_type to a2a"
        )
    if size % 2:
        raise ConfigError(
            f"parallel.tp_comm_overlap runs a micro-batch as two halves, but train.micro_batch_size is {size}; make it "
            "even, or leave tp_comm_overlap out"
        )
    if config.model.num_experts is not None:
        raise ConfigError(
            f"parallel.tp_comm_overlap does not know the exchange of tokens of model.num_experts "
            f"{config.model.num_experts} experts; leave it out"
        )
    if parallel.pipeline_schedule == "zero_bubble":
        raise ConfigError(
            "parallel.tp_comm_overlap orders the work inside compiled layers, but pipeline_schedule zero_bubble takes "
            "backward passes apart and compiles none; choose another schedule, or leave tp_comm_overlap out"
        )


def overlap_notes(config: RunConfig, compiled: bool) -> list[str]:
    """What to tell of tp_comm_overlap where layers are not compiled, and of copy engines that have nothing to move."""
    parallel, notes = config.parallel, []
    if parallel.tp_comm_overlap and not compiled:
        notes.append(
            "parallel.tp_comm_overlap hides nothing without runtime.compile: the halves of a micro-batch run one "
            "behind the other"
        )
    direct = parallel.symmetric_memory_groups
    if "cp" in direct and parallel.context_parallel_size > 1 and "a2a" not in parallel.cp_comm_type:
        notes.append(
            "parallel.symmetric_memory_groups has cp, but copy engines exchange heads, which cp_comm_type "
            f"{parallel.cp_comm_type} does not; choose a2a or a2a+p2p where heads divide"
        )
    return notes
