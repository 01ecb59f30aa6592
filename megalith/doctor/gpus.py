"""GPU health through NVML (the package nvidia-ml-py): temperature, clocks, power, memory and memory errors.

A training run reads all GPUs at each log interval. The step's metrics describe the hottest, the slowest and the least
busy GPU, because one slow GPU delays every collective. A GPU that is throttled, has memory errors or runs out of memory
is reported once, when the fault begins. `megalith doctor` reads the same state.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megalith.comm.collectives import Axis, gather_json

SLOWED = {
    0x08: "slowed by hardware (heat or power)",
    0x20: "slowed by the driver because of heat",
    0x40: "slowed by hardware because of heat",
    0x80: "slowed by the power supply's brake",
}
"""Bits of NVML's clock throttle reasons that are faults. The bits for an idle GPU and for the power cap (0x04), which a
busy GPU usually reaches, are not faults.
"""

MEMORY_FULL = "its memory is full or fragmented"  # a fault of the settings, not of the hardware


@dataclass(frozen=True)
class GpuState:
    """State of one GPU, read once. Fields that the driver does not report are None."""

    name: str
    temperature: int | None = None
    """°C."""
    utilization: int | None = None
    """Percentage of the last sampling period during which a kernel ran."""
    power: float | None = None
    """W."""
    power_limit: float | None = None
    memory_used: int | None = None
    """Bytes, over all processes."""
    memory_total: int | None = None
    clock: int | None = None
    """SM clock, MHz."""
    max_clock: int | None = None
    slowed: int = 0
    """Active throttle reasons, a bit mask of the keys of SLOWED."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    rows_pending: bool = False
    """True if a memory row will be remapped at the next reset."""
    rows_failed: bool = False
    """True if remapping a memory row failed."""
    alloc_retries: int | None = None
    """Times since the last reading that PyTorch ran out of memory, freed its cache and retried."""

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
        """Return the GPU's faults, each with advice; empty for a healthy GPU."""
        faults = []
        if reasons := [text for bit, text in SLOWED.items() if self.slowed & bit]:
            faults.append(
                f"{' and '.join(reasons)}, at {self.temperature} °C and {self.clock} of {self.max_clock} MHz: look at "
                "its cooling and power supply"
            )
        if self.ecc_errors:
            faults.append(
                f"{self.ecc_errors} memory errors that ECC could not correct: reset the GPU, and replace it if the "
                "errors return"
            )
        if self.rows_failed:
            faults.append("a row of its memory could not be replaced: replace the GPU")
        elif self.rows_pending:
            faults.append("a row of its memory waits to be replaced: reset the GPU")
        if self.alloc_retries:
            faults.append(
                f"{MEMORY_FULL}, so PyTorch freed its cache and retried {self.alloc_retries} "
                "times while all kernels waited: recompute more "
                "(parallel.recompute_granularity), or lower train.micro_batch_size"
            )
        return faults


def read_gpu(uuid: str) -> GpuState | None:
    """Return the state of the GPU with this UUID (`GPU-…`); None if nvidia-ml-py or the driver's answer is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no package or driver, or a container or MIG slice that hides the GPU
        return None

    def query(function: str, *arguments: object) -> Any:
        try:
            return getattr(pynvml, function)(gpu, *arguments)
        except (pynvml.NVMLError, AttributeError):  # not supported by this GPU, driver or version
            return None

    rates, memory = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetMemoryInfo")
    power, limit = query("nvmlDeviceGetPowerUsage"), query("nvmlDeviceGetEnforcedPowerLimit")
    _, _, pending, failed = query("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    reasons = query("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons")
    name = query("nvmlDeviceGetName") or "GPU"
    return GpuState(
        name=name if isinstance(name, str) else name.decode(),
        temperature=query("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        utilization=rates and rates.gpu,
        power=power and power / 1000,
        power_limit=limit and limit / 1000,
        memory_used=memory and memory.used,
        memory_total=memory and memory.total,
        clock=query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        max_clock=query("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        slowed=(reasons or 0) & sum(SLOWED),
        ecc_errors=query(
            "nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        rows_pending=bool(pending),
        rows_failed=bool(failed),
    )


def gpu_uuid(device: torch.device | int) -> str:
    """Return NVML's UUID of the GPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class GpuMonitor:
    """Reads the GPUs of all ranks at each log interval and reports each new fault on rank 0 through `on_event`."""

    def __init__(self, device: torch.device, world: Axis, on_event: Callable[..., None]):
        """Prepare to read the GPUs. A collective call if the ranks have GPUs."""
        self._world, self._on_event = world, on_event
        self._device = device
        self._uuid = gpu_uuid(device) if device.type == "cuda" else None
        self._retries = 0  # allocation retries up to the last reading
        self._reported: set[tuple[int, str]] = set()  # (rank, kind of fault)
        self._state_logged = False
        state = self._uuid and read_gpu(self._uuid)
        self.enabled = device.type == "cuda" and all(gather_json(state is not None, world))

    def read(self, step: int) -> dict[str, float]:
        """Return the `gpu_*` metrics of `step`; empty except on rank 0. A collective call if `enabled`."""
        if not self.enabled:
            return {}
        local = replace(read_gpu(self._uuid) or GpuState("GPU"), alloc_retries=self._new_retries())
        states = gather_json([socket.gethostname(), asdict(local)], self._world, to_first=True)
        gpus = [(host, GpuState(**state)) for host, state in states]
        if gpus and not self._state_logged:
            self._state_logged = True
            self._on_event(f"[0] {gpus[0][1]}", event="gpu_state", step=step)
        for rank, (host, gpu) in enumerate(gpus):
            self._report_faults(step, rank, host, gpu)
        return gpu_metrics([gpu for _, gpu in gpus]) if gpus else {}

    def begin(self) -> None:
        """Ignore the allocation retries of the first step, because compilation and autotuning need extra memory."""
        if self.enabled:
            self._new_retries()

    def _new_retries(self) -> int:
        before, stats = self._retries, torch.cuda.memory_stats(self._device)
        self._retries = stats.get("num_alloc_retries", 0)
        return self._retries - before

    def _report_faults(self, step: int, rank: int, host: str, gpu: GpuState) -> None:
        faults = gpu.faults()
        for fault in faults:
            kind = fault.partition(",")[0]  # without the values, which change while the fault lasts
            if (rank, kind) not in self._reported:
                self._reported.add((rank, kind))
                text = f"warning: the GPU of rank {rank} on {host} ({gpu.name}): {fault}"
                is_hardware = not fault.startswith(MEMORY_FULL)
                self._on_event(text, event="gpu", step=step, rank=rank, host=host, is_hardware=is_hardware)
        if not faults:
            self._reported = {(other, kind) for other, kind in self._reported if other != rank}


def gpu_metrics(gpus: Sequence[GpuState]) -> dict[str, float]:
    """Return the worst value over all GPUs of each metric that the driver reports; ECC errors are added up."""
    columns = {
        "gpu_temperature": (max, [gpu.temperature for gpu in gpus]),
        "gpu_utilization": (min, [gpu.utilization for gpu in gpus]),
        "gpu_power_w": (max, [gpu.power for gpu in gpus]),
        "gpu_memory_gb": (max, [gpu.memory_used and gpu.memory_used / 1e9 for gpu in gpus]),
        "gpu_clock_mhz": (min, [gpu.clock for gpu in gpus]),
        "gpu_ecc_errors": (sum, [gpu.ecc_errors for gpu in gpus]),
        "gpu_alloc_retries": (max, [gpu.alloc_retries for gpu in gpus]),
    }
    return {
        name: worst(reported)
        for name, (worst, values) in columns.items()
        if (reported := [value for value in values if value is not None])
    }
