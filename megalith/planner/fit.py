"""Whether a job fits its devices' memory, and what is done where it does not.

`plan show` prints the sentence, `train --dry-run --device` and `launch --device` fail with it. A run itself is refused
only where the estimate cannot be wrong: the weights and the optimizer's state alone exceed a device's memory. Where the
whole estimate does not fit, the run prints a warning and starts.
"""

from __future__ import annotations

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.planner.layout import Layout, build_layout, with_auto
from megalith.planner.memory import MemoryEstimate
from megalith.planner.rates import Rates, rates_of
from megalith.planner.search import usable_bytes

GB = 1e9
MOST_MEMORY = int(310 * GB)  # no GPU has more; the largest have 288 GiB


def fit_sentence(gpus: int, device: str, expected: float, usable: float) -> str:
    """How `gpus` devices compare with the bytes that are expected on the fullest one."""
    fits = "fits" if expected <= usable else "does NOT fit"
    return f"{gpus} {device}: {fits}, {expected / GB:.1f} GB of {usable / GB:.1f} on the fullest GPU"


def fullest_stage(layout: Layout) -> MemoryEstimate:
    """The memory of a device of the stage that takes most."""
    return max((stage.memory for stage in layout.stages), key=lambda memory: memory.total)


def require_fit(layout: Layout, rates: Rates) -> None:
    """Raises ConfigError where a layout is not expected to fit `rates`' devices."""
    expected, usable = fullest_stage(layout).total, usable_bytes(rates)
    if expected > usable:
        raise ConfigError(
            f"{fit_sentence(layout.world_size, rates.device, expected, usable)}; {_way_out(layout)}"
        )


def memory_warnings(layout: Layout, memory: int, device: str = "a GPU here") -> list[str]:
    """A warning where a layout is not expected to fit `device`, which has `memory` bytes.

    Raises ConfigError where it cannot: its weights and optimizer state alone take more.
    """
    most = fullest_stage(layout)
    state = most.weights + most.optimizer
    if state > memory:
        raise ConfigError(
            f"weights and optimizer state alone take {state / GB:.1f} GB on the fullest of {layout.world_size} "
            f"processes, and {device} has {memory / GB:.1f} GB; {_way_out(layout)}"
        )
    if most.total <= memory:
        return []
    return [
        f"warning: {most.total / GB:.1f} GB are expected on the fullest of {layout.world_size} processes, and {device} "
        f"has {memory / GB:.1f} GB; {_way_out(layout)}"
    ]


def warnings_without_device(config: RunConfig, world_size: int, gpus_per_node: int) -> list[str]:
    """`memory_warnings` of a job on GPUs that nobody has named: of those that an H100 has not enough memory for."""
    machine = rates_of("H100").machine(world_size, gpus_per_node)
    layout = build_layout(with_auto(config, world_size, machine)[0], world_size)
    expected = fullest_stage(layout).total
    memory_warnings(layout, MOST_MEMORY, "the largest GPU")
    if expected <= machine.memory:
        return []
    return [
        f"{expected / GB:.1f} GB are expected on the fullest GPU, more than an H100's {machine.memory / GB:.1f}; name "
        "the GPUs by --device NAME to have it checked"
    ]


def _way_out(layout: Layout) -> str:
    return (
        f"`megalith plan RUN_FILE --gpus {layout.world_size}` lists layouts that fit, with their settings; or use more "
        "GPUs"
    )
