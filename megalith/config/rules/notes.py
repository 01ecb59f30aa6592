"""What a run's user should know of settings: those that have a value of their own but change nothing in this run.

They are no mistake: one file may serve many runs. But whoever sets `recompute_modules` and forgets
`recompute_granularity` should not have to find that out from the memory that is used. What a setting needs stands in
its annotation (`RequiresSetting`); what a device or a compiled layer makes of it stands here.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.base import Section
from megalith.config.run import RunConfig


def idle_notes(config: RunConfig) -> list[str]:
    """A sentence for each setting whose value is not the default, and which this run does not read."""
    return [note for name in RunConfig.model_fields for note in _idle(getattr(config, name), name, config)]


def _idle(section: Section, path: str, config: RunConfig) -> Iterator[str]:
    unread = section.unread(config)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in unread and value != field.default:
            needs = unread[name]
            outer = "" if "." in needs.path else f"{path}."
            yield f"{path}.{name} {value} has no effect: it requires {outer}{needs}"
        elif isinstance(value, Section):
            yield from _idle(value, f"{path}.{name}", config)


def offload_notes(config: RunConfig, device_type: str) -> list[str]:
    """Return notes on offloading if the device is the CPU."""
    if device_type != "cpu":
        return []
    notes = []
    if config.optim.optimizer_cpu_offload:
        notes.append(
            "optim.optimizer_cpu_offload changes nothing on a CPU: the state is in host memory anyway"
        )
    if config.parallel.cpu_offloading_num_layers:
        notes.append(
            "parallel.cpu_offloading_num_layers saves nothing on a CPU: activations are copied in its memory"
        )
    return notes


def overlap_notes(config: RunConfig, compiled: bool) -> list[str]:
    """Return notes on tp_comm_overlap without compilation, and on copy engines with nothing to move."""
    parallel, notes = config.parallel, []
    if parallel.overlaps and not compiled:
        notes.append(
            "parallel.tp_comm_overlap hides nothing without runtime.compile: the halves of a micro-batch run one "
            "behind the other"
        )
    if "dp" in parallel.symmetric_memory_groups:
        notes.append(
            "parallel.symmetric_memory_groups has dp, whose gradients NCCL sums as fast: it changes nothing"
        )
    alone = parallel.context_parallel_size > 1 and "a2a" not in parallel.cp_exchange
    if "cp" in parallel.direct_axes and alone:
        notes.append(
            "parallel.symmetric_memory_groups has cp, but copy engines exchange heads, which cp_comm_type "
            f"{parallel.cp_exchange} does not; choose a2a or a2a+p2p where heads divide"
        )
    return notes
