"""How a GPU is: heat, clocks, power, memory and its errors, asked of the driver by NVML (the package nvidia-ml-py).

A run reads its GPUs at every log interval, while they work: the figures stand in the line of that step, the hottest,
slowest and least busy GPU's of all ranks, and a GPU that is slowed by heat or power, or whose memory fails, is named
when that begins. One slow GPU slows all: they meet in every collective. `megalith doctor` reads the same.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megalith.comm.collectives import Axis, gather_json

SLOWED = {
    0x08: "slowed by hardware (heat or power)",
    0x20: "slowed for heat by the driver",
    0x40: "slowed for heat by hardware",
    0x80: "slowed by the power supply's brake",
}
"""Bits of NVML's reasons for low clocks that are faults. Its power cap (0x04) is how a busy GPU runs, idle is none."""


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. What the driver does not tell is None."""

    name: str
    temperature: int | None = None
    """°C."""
    utilization: int | None = None
    """Per cent of the last moments in which a kernel ran."""
    power: float | None = None
    """W."""
    power_limit: float | None = None
    memory_used: int | None = None
    """Bytes, of all processes."""
    memory_total: int | None = None
    clock: int | None = None
    """MHz of the SMs."""
    max_clock: int | None = None
    slowed: int = 0
    """Bits of SLOWED."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected since the driver was loaded."""
    rows_pending: bool = False
    """A row of the memory is replaced at the next reset."""
    rows_failed: bool = False
    """A row of the memory could not be replaced."""

    def __str__(self) -> str:
        """`NVIDIA H200 | 60 °C, 100 % | 80161 / 143771 MB | 612 / 700 W | 1755 / 1980 MHz`"""
        pairs = [
            (self.memory_used and self.memory_used // 2**20, self.memory_total and self.memory_total // 2**20, "MB"),
            (self.power and round(self.power), self.power_limit and round(self.power_limit), "W"),
            (self.clock, self.max_clock, "MHz"),
        ]  # fmt: skip
        parts = [f"{used} / {most} {unit}" for used, most, unit in pairs if None not in (used, most)]
        heat = f"{self.temperature} °C, {self.utilization} %"
        return " | ".join([self.name, heat.replace("None", "?"), *parts])

    def faults(self) -> list[str]:
        """What is wrong with it, each with what to do; none of a healthy one."""
        found = []
        if reasons := [text for bit, text in SLOWED.items() if self.slowed & bit]:
            found.append(
                f"{' and '.join(reasons)}, at {self.temperature} °C and {self.clock} of {self.max_clock} MHz: look at "
                "its cooling and power supply"
            )
        if self.ecc_errors:
            found.append(
                f"{self.ecc_errors} memory errors that ECC could not correct: reset it, and replace it if they return"
            )
        if self.rows_failed:
            found.append("a row of its memory could not be replaced: replace the GPU")
        elif self.rows_pending:
            found.append("a row of its memory waits to be replaced: reset it")
        return found


def read_gpu(uuid: str) -> GpuState | None:
    """The state of the GPU with this UUID (`GPU-…`); None without nvidia-ml-py or where the driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no package, no driver, a container or MIG slice that is not shown
        return None

    def ask(function: str, *arguments: object) -> Any:
        try:
            return getattr(pynvml, function)(gpu, *arguments)
        except (pynvml.NVMLError, AttributeError):  # not supported by this GPU, driver or version
            return None

    rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    name = ask("nvmlDeviceGetName") or "GPU"
    return GpuState(
        name=name if isinstance(name, str) else name.decode(),
        temperature=ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        utilization=rates and rates.gpu,
        power=power and power / 1000,
        power_limit=limit and limit / 1000,
        memory_used=memory and memory.used,
        memory_total=memory and memory.total,
        clock=ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        max_clock=ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        slowed=(reasons or 0) & sum(SLOWED),
        ecc_errors=ask(
            "nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        rows_pending=bool(pending),
        rows_failed=bool(failed),
    )


def uuid_of(device: torch.device | int) -> str:
    """As NVML names the GPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class GpuWatch:
    """`read` at each log interval, on every rank. `tell` is called with what begins to be wrong, on the first."""

    def __init__(self, device: torch.device, world: Axis, tell: Callable[..., None]):
        """A collective call, where the ranks have GPUs."""
        self._world, self._tell = world, tell
        self._uuid = uuid_of(device) if device.type == "cuda" else None
        self._told: set[tuple[int, str]] = set()
        self._shown = False
        first = self._uuid and read_gpu(self._uuid)
        self.enabled = device.type == "cuda" and all(gather_json(first is not None, world))

    def read(self, step: int) -> dict[str, float]:
        """The keys that the step's line has besides; on the first rank alone. A collective call where `enabled`."""
        if not self.enabled:
            return {}
        own = read_gpu(self._uuid) or GpuState("GPU")
        states = gather_json([socket.gethostname(), asdict(own)], self._world, to_first=True)
        gpus = [(host, GpuState(**state)) for host, state in states]
        if gpus and not self._shown:
            self._shown = True
            self._tell(f"[0] {gpus[0][1]}", event="gpu_state", step=step)
        for rank, (host, gpu) in enumerate(gpus):
            self._name(step, rank, host, gpu)
        return gpu_figures([gpu for _, gpu in gpus]) if gpus else {}

    def _name(self, step: int, rank: int, host: str, gpu: GpuState) -> None:
        faults = gpu.faults()
        for fault in faults:
            kind = fault.partition(",")[0]  # of one that lasts the figures change
            if (rank, kind) not in self._told:
                self._told.add((rank, kind))
                text = f"warning: the GPU of rank {rank} on {host} ({gpu.name}): {fault}"
                self._tell(text, event="gpu", step=step, rank=rank, host=host)
        if not faults:
            self._told = {told for told in self._told if told[0] != rank}


def gpu_figures(gpus: Sequence[GpuState]) -> dict[str, float]:
    """The worst of all GPUs by each measure, as far as the driver tells it."""
    columns = {
        "gpu_temperature": (max, [gpu.temperature for gpu in gpus]),
        "gpu_utilization": (min, [gpu.utilization for gpu in gpus]),
        "gpu_power_w": (max, [gpu.power for gpu in gpus]),
        "gpu_memory_gb": (max, [gpu.memory_used and gpu.memory_used / 1e9 for gpu in gpus]),
        "gpu_clock_mhz": (min, [gpu.clock for gpu in gpus]),
        "gpu_ecc_errors": (sum, [gpu.ecc_errors for gpu in gpus]),
    }
    return {
        name: worst(known)
        for name, (worst, values) in columns.items()
        if (known := [value for value in values if value is not None])
    }
