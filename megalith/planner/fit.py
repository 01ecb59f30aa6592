"""Checks that compare a job's expected memory with the memory of its devices.

`plan show` prints the result; `train --dry-run --device` and `launch --device` fail if the job does not fit. A training
run fails only if the weights and the optimizer state alone, which are exact, exceed a device's memory, or on a CPU the
machine's. If only the full estimate exceeds it, the run prints a warning and starts.
"""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.errors import ConfigError
from megalith.hardware import host_memory_bytes
from megalith.planner.layout import Layout, build_layout
from megalith.planner.memory import MemoryEstimate
from megalith.planner.memory_choices import with_auto
from megalith.planner.rates import Rates, rates_of
from megalith.planner.search import usable_bytes

GB = 1e9
MAX_GPU_MEMORY = int(310 * GB)  # the largest GPUs have 288 GiB


def fit_sentence(gpus: int, device: str, expected: float, usable: float) -> str:
    """Return a sentence that compares the expected with the usable bytes on the fullest device."""
    fits = "fits" if expected <= usable else "does NOT fit"
    return f"{gpus} {device}: {fits}, {expected / GB:.1f} GB of {usable / GB:.1f} on the fullest GPU"


def fullest_stage(layout: Layout) -> MemoryEstimate:
    """Return the memory per device of the stage that needs the most."""
    return max((stage.memory for stage in layout.stages), key=lambda memory: memory.total)


def require_fit(layout: Layout, rates: Rates) -> None:
    """Raise ConfigError if a layout is not expected to fit the devices of `rates`."""
    expected, usable = fullest_stage(layout).total, usable_bytes(rates)
    if expected > usable:
        raise ConfigError(
            f"{fit_sentence(layout.world_size, rates.device, expected, usable)}; {_search_hint(layout)}"
        )


def memory_warnings(layout: Layout, memory: int, device: str = "a GPU here") -> list[str]:
    """Return a warning if the layout probably does not fit `device`, which has `memory` bytes.

    Raises:
        ConfigError: the weights and optimizer state alone exceed the memory.
    """
    estimate = fullest_stage(layout)
    state = estimate.weights + estimate.optimizer
    if state > memory:
        raise ConfigError(
            f"weights and optimizer state alone take {state / GB:.1f} GB on the fullest of "
            f"{layout.world_size} processes, but {device} has only {memory / GB:.1f} GB; "
            f"{_search_hint(layout)}"
        )
    if estimate.total <= memory:
        return []
    return [
        f"warning: {estimate.total / GB:.1f} GB are expected on the fullest of {layout.world_size} "
        f"processes, but {device} has only {memory / GB:.1f} GB; {_search_hint(layout)}"
    ]


def warnings_on_cpu(config: RunConfig, world_size: int) -> list[str]:
    """Return a warning if a job that trains only on this machine's CPU is expected to exceed its memory.

    Raises:
        ConfigError: the weights and optimizer states alone exceed this machine's memory.
    """
    memory = host_memory_bytes()
    if memory is None:
        return []
    layout = build_layout(with_auto(config, world_size, Machine())[0], world_size)
    estimates = [layout.stage_of(rank).memory for rank in range(world_size)]
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    short = f"but this machine has only {memory / GB:.1f} GB of memory"
    state = sum(estimate.weights + estimate.optimizer for estimate in estimates)
    if state > memory:
        raise ConfigError(
            f"weights and optimizer state alone take {state / GB:.1f} GB in {processes} on the CPU, {short}; use a "
            "smaller model, or a machine with more memory or a GPU"
        )
    total = sum(estimate.total for estimate in estimates)
    if total <= memory:
        return []
    return [
        f"warning: {total / GB:.1f} GB are expected in {processes} on the CPU, {short}; lower "
        "train.micro_batch_size or data.seq_length, or use a smaller model"
    ]


def warnings_without_device(config: RunConfig, world_size: int, gpus_per_node: int) -> list[str]:
    """Return a warning if a job without a named device is not expected to fit an H100.

    Raises:
        ConfigError: the weights and optimizer state alone exceed the largest GPU.
    """
    machine = rates_of("H100").machine(world_size, gpus_per_node)
    layout = build_layout(with_auto(config, world_size, machine)[0], world_size)
    expected = fullest_stage(layout).total
    memory_warnings(layout, MAX_GPU_MEMORY, "the largest GPU")
    if expected <= machine.memory:
        return []
    return [
        f"{expected / GB:.1f} GB are expected on the fullest GPU, more than an H100's {machine.memory / GB:.1f}; pass "
        "--device NAME to check against another GPU"
    ]


def _search_hint(layout: Layout) -> str:
    return (
        f"`megalith plan RUN_FILE --gpus {layout.world_size}` lists layouts that fit, with their settings; or use more "
        "GPUs"
    )
