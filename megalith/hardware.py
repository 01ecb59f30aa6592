"""The devices: choosing one, and what its datasheet promises.

Model FLOP utilisation divides by a device's peak, so a wrong peak is a wrong result that looks right. The
table therefore matches the exact name that the driver reports, and a name that is not there (every CPU, a
laptop part, a MIG slice, a new product) has no peak: utilisation is then not reported at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalith.errors import ConfigError

if TYPE_CHECKING:
    import torch

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class DeviceInfo:
    """One device, as the run's summary and the utilisation figure need it.

    name: as the driver reports it.
    peak_flops: dense FLOP/s without sparsity, by dtype (`fp32`, `tf32`, `bf16`, `fp16`, `fp8`; a dtype that
        the device does not multiply is absent), or None for a device that the table does not know.
    memory_bytes: of this very device, or None where it cannot be asked.
    """

    name: str
    peak_flops: Mapping[str, float] | None = None
    memory_bytes: int | None = None

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s in `dtype`, or None when it is not known."""
        return self.peak_flops.get(dtype) if self.peak_flops is not None else None


@dataclass(frozen=True)
class Datasheet:
    """Vendor figures: dense TFLOP/s by dtype (matrix units with fp32 accumulation; `fp32` is the ordinary
    units, `tf32` the matrix units on fp32 data) and memory bandwidth in GB/s. None: not supported."""

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


# Sources: the vendors' datasheets and architecture white papers. Where a sheet prints figures "with sparsity"
# the half is taken. GeForce parts accumulate in fp32 at half the rate of fp16 accumulation: training uses the
# former. An MI250X is two devices to PyTorch, so its row is half the package.
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
    """What is known of a device by the exact `name` that its driver reports."""
    sheet = DATASHEETS.get(name)
    if sheet is None:
        return DeviceInfo(name, memory_bytes=memory_bytes)
    return DeviceInfo(name, sheet.peak_flops(), memory_bytes)


def local_device_info(device: torch.device | str) -> DeviceInfo:
    """The `DeviceInfo` of a device of this machine; for the CPU the name, the cores and the memory only."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return device_info(properties.name, properties.total_memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return DeviceInfo(f"CPU ({cores} core{'s' if cores != 1 else ''})", memory_bytes=_host_memory_bytes())


def largest_gpu_memory() -> int | None:
    """Bytes of the GPU of this machine that has most, as the driver's library counts them; None where it is not there.

    CUDA is not started for it: the process that asks would hold memory on the GPU.
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


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # a system without these names
        return None


def pick_device(request: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that `runtime.device` asks for.

    `auto` is CUDA where there is any, else the CPU; `auto` and `cuda` give process `local_rank` of a machine
    the GPU of that number; `cuda:1` is taken as it stands. A ConfigError where CUDA is asked for and absent.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request == "cpu" or (request == "auto" and available == 0):
        return torch.device("cpu")
    kind, _, number = request.partition(":")
    if request != "auto" and (kind != "cuda" or (":" in request and not number.isdigit())):
        raise ConfigError(f"device {request!r} is not known; give auto, cpu, cuda or cuda:N")
    if available == 0:
        raise ConfigError(
            f"device {request!r} is asked for, but PyTorch {torch.__version__} finds no CUDA device here; "
            "set runtime.device to cpu or auto, or install a CUDA build of torch and check nvidia-smi"
        )
    index = int(number) if number else local_rank
    if index >= available:
        asked = f"device cuda:{index} is asked for" if number else f"local rank {index} needs GPU {index}"
        raise ConfigError(
            f"{asked}, but this machine has {available} CUDA device{'s' if available != 1 else ''} "
            f"(numbers 0 to {available - 1}); start at most {available} processes, or name one of these"
        )
    return torch.device("cuda", index)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on a device, without the host waiting for what the device has still to do.

    Out of memory of the host that is not pinned CUDA copies when all that was launched before is done, and the host
    waits; such a tensor is copied into pinned memory first.
    """
    import torch

    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
