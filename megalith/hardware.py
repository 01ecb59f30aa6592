"""Device selection, and the peak figures of known GPUs.

MFU divides by a device's peak, so a wrong peak would give a plausible but wrong result. The table therefore matches
the exact name that the driver reports. Other devices (CPUs, laptop GPUs, MIG slices, new products) have no peak, and
MFU is not reported for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.errors import ConfigError

if TYPE_CHECKING:
    import torch

TERA = 1e12
GIGA = 1e9
LAUNCHES = 1000  # that are timed
CONTAINER_LIMITS = (  # of memory, as a container sees its own cgroup: version 2, version 1
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True)
class DeviceInfo:
    """A device's name, peak and memory.

    Attributes:
        name: as the driver reports it.
        peak_flops: dense FLOP/s without sparsity by dtype (`fp32`, `tf32`, `bf16`, `fp16`, `fp8`; unsupported dtypes
            are absent); None for a device that is not in the table.
        memory_bytes: memory of this device, None if unknown.
    """

    name: str
    peak_flops: Mapping[str, float] | None = None
    memory_bytes: int | None = None

    def peak(self, dtype: str) -> float | None:
        """Return dense FLOP/s in `dtype`, or None if unknown."""
        return self.peak_flops.get(dtype) if self.peak_flops is not None else None


@dataclass(frozen=True)
class Datasheet:
    """Vendor figures: dense TFLOP/s by dtype, and memory bandwidth in GB/s. None means not supported.

    Figures are for dense matrix units with fp32 accumulation. `fp32` is the rate of the ordinary units, `tf32` that of
    the matrix units on fp32 data.
    """

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    fp8: float | None
    bandwidth: float

    def peak_flops(self) -> dict[str, float]:
        figures = {
            "fp32": self.fp32,
            "tf32": self.tf32,
            "bf16": self.bf16,
            "fp16": self.fp16,
            "fp8": self.fp8,
        }
        return {dtype: tera * TERA for dtype, tera in figures.items() if tera is not None}


# Sources: vendors' datasheets and architecture white papers. Figures "with sparsity" are halved. GeForce GPUs
# accumulate in fp32, as training does, at half the rate of fp16 accumulation. PyTorch sees an MI250X as two devices,
# so its row is half the package.
V100_SXM2 = Datasheet(fp32=15.7, tf32=None, bf16=None, fp16=125, fp8=None, bandwidth=900)
V100_PCIE = Datasheet(fp32=14.0, tf32=None, bf16=None, fp16=112, fp8=None, bandwidth=900)
T4 = Datasheet(fp32=8.1, tf32=None, bf16=None, fp16=65, fp8=None, bandwidth=320)
A100_40 = Datasheet(fp32=19.5, tf32=156, bf16=312, fp16=312, fp8=None, bandwidth=1555)
A100_80_SXM = Datasheet(fp32=19.5, tf32=156, bf16=312, fp16=312, fp8=None, bandwidth=2039)
A100_80_PCIE = Datasheet(fp32=19.5, tf32=156, bf16=312, fp16=312, fp8=None, bandwidth=1935)
A10 = Datasheet(fp32=31.2, tf32=62.5, bf16=125, fp16=125, fp8=None, bandwidth=600)
A40 = Datasheet(fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7, fp8=None, bandwidth=696)
RTX_A6000 = Datasheet(fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, fp8=None, bandwidth=768)
RTX_3090 = Datasheet(fp32=35.6, tf32=35.6, bf16=71, fp16=71, fp8=None, bandwidth=936)
RTX_4090 = Datasheet(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, bandwidth=1008)
RTX_5090 = Datasheet(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, bandwidth=1792)
L4 = Datasheet(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, bandwidth=300)
L40S = Datasheet(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, bandwidth=864)
H100_SXM = Datasheet(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, bandwidth=3350)
H100_PCIE = Datasheet(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, bandwidth=2000)
H100_NVL = Datasheet(fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5, bandwidth=3900)
GH200_96 = Datasheet(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, bandwidth=4000)
H200_SXM = Datasheet(fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, bandwidth=4800)
H200_NVL = Datasheet(fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5, bandwidth=4800)
H20 = Datasheet(fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, bandwidth=4000)
B200 = Datasheet(fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, bandwidth=8000)
GB200 = Datasheet(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, bandwidth=8000)
MI250X_HALF = Datasheet(fp32=23.9, tf32=None, bf16=191.5, fp16=191.5, fp8=None, bandwidth=1638)
MI300X = Datasheet(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9, bandwidth=5300)

DATASHEETS: dict[str, Datasheet] = {
    "Tesla V100-SXM2-16GB": V100_SXM2,
    "Tesla V100-SXM2-32GB": V100_SXM2,
    "Tesla V100-PCIE-16GB": V100_PCIE,
    "Tesla V100-PCIE-32GB": V100_PCIE,
    "Tesla T4": T4,
    "A100-SXM4-40GB": A100_40,
    "NVIDIA A100-SXM4-40GB": A100_40,
    "A100-PCIE-40GB": A100_40,
    "NVIDIA A100-PCIE-40GB": A100_40,
    "A100-SXM4-80GB": A100_80_SXM,
    "NVIDIA A100-SXM4-80GB": A100_80_SXM,
    "NVIDIA A800-SXM4-80GB": A100_80_SXM,
    "NVIDIA A100 80GB PCIe": A100_80_PCIE,
    "NVIDIA A800 80GB PCIe": A100_80_PCIE,
    "NVIDIA A10": A10,
    "NVIDIA A40": A40,
    "NVIDIA RTX A6000": RTX_A6000,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA L4": L4,
    "NVIDIA L40S": L40S,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H800": H100_SXM,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA GH200 480GB": GH200_96,
    "NVIDIA H200": H200_SXM,
    "NVIDIA H200 NVL": H200_NVL,
    "NVIDIA H20": H20,
    "NVIDIA B200": B200,
    "NVIDIA GB200": GB200,
    "AMD Instinct MI250X": MI250X_HALF,
    "AMD Instinct MI300X": MI300X,
}


def device_info(name: str, memory_bytes: int | None = None) -> DeviceInfo:
    """Look up a device by the exact `name` that its driver reports."""
    sheet = DATASHEETS.get(name)
    if sheet is None:
        return DeviceInfo(name, memory_bytes=memory_bytes)
    return DeviceInfo(name, sheet.peak_flops(), memory_bytes)


def local_device_info(device: torch.device | str) -> DeviceInfo:
    """Return the `DeviceInfo` of a device of this machine; for the CPU only the name, cores and memory."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return device_info(properties.name, properties.total_memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return DeviceInfo(f"CPU ({cores} core{'s' if cores != 1 else ''})", memory_bytes=host_memory_bytes())


def largest_gpu_memory() -> int | None:
    """Return the memory in bytes of this machine's largest GPU, None without NVML.

    NVML does not initialize CUDA, which would allocate memory on the GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver
        return None
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return max((pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles), default=None)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def host_memory_bytes() -> int | None:
    """Return the memory in bytes of this machine, or of this container if it is limited, or None if unknown."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # a system without these names
        return None
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or no limit: "max"
            memory = min(memory, int(Path(file).read_text()))
    return memory


def pick_device(request: str = "auto", local_rank: int = 0) -> torch.device:
    """Return the device for a value of `runtime.device`.

    Args:
        request: `auto` (CUDA if available, else the CPU), `cpu`, `cuda` or `cuda:N`.
        local_rank: index of the GPU for `auto` and `cuda`.

    Raises:
        ConfigError: the device does not exist.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request == "cpu" or (request == "auto" and available == 0):
        return torch.device("cpu")
    kind, _, number = request.partition(":")
    if request != "auto" and (kind != "cuda" or (":" in request and not number.isdigit())):
        raise ConfigError(f"device {request!r} is not known; use auto, cpu, cuda or cuda:N")
    if available == 0:
        raise ConfigError(
            f"device {request!r} was requested, but PyTorch {torch.__version__} finds no CUDA device here; "
            "set runtime.device to cpu or auto, or install a CUDA build of torch and check nvidia-smi"
        )
    index = int(number) if number else local_rank
    if index >= available:
        need = f"device cuda:{index} was requested" if number else f"local rank {index} needs GPU {index}"
        raise ConfigError(
            f"{need}, but this machine has {available} CUDA device{'s' if available != 1 else ''} "
            f"(numbers 0 to {available - 1}); start at most {available} processes, or choose one "
            "of these devices"
        )
    return torch.device("cuda", index)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to a device without blocking the host.

    A CUDA copy from unpinned memory would block the host until all earlier kernels are done, so an unpinned tensor is
    pinned first.
    """
    import torch

    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def launch_microseconds(device: torch.device | str) -> float:
    """Return the time in microseconds that the host takes to launch a small operator on `device`: the median of three
    measurements.

    Hosts with the same GPU differ: launches took 2 to 11 µs. If a layer's kernels are short, the GPU waits for a slow
    host.
    """
    import torch

    x = torch.zeros(8, device=device)
    taken = []
    for _ in range(4):  # the first warms up
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1)
        taken.append(time.perf_counter() - began)
        if x.is_cuda:
            torch.cuda.synchronize(device)
    return 1e6 * sorted(taken[1:])[1] / LAUNCHES
