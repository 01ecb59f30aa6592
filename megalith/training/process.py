"""Process-wide setup before a run: device, determinism, compiler limits and the machine's links."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import socket
import zlib

import torch
import torch.distributed as dist

from megalith.compat.dynamo import raise_recompile_limit
from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.errors import ConfigError
from megalith.hardware import launch_microseconds, pick_device
from megalith.launch.parent import boot_id
from megalith.ops import kernels
from megalith.parallel.apply import compiles
from megalith.planner.topology import NVLINK, read_links

RECOMPILE_LIMIT = 64  # variants of one layer's code: shapes, training and evaluation
FP8_CAPABILITY, BLOCK_CAPABILITY = (
    (8, 9),
    (9, 0),
)  # compute capability for FP8 matmuls, and for 128 × 128 blocks


def prepare_process(config: RunConfig, local_rank: int) -> torch.device:
    """Set up this process for the run. Returns the device of process `local_rank` on this machine.

    Enables deterministic kernels if configured, disables TF32 in fp32 runs, and raises the compiler's limit so that
    several models fit.
    """
    if config.parallel.symmetric_memory_groups == "auto" or config.parallel.copy_engine_axes:
        raise_cuda_connections()
    device = pick_device(config.runtime.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_fp8_device(config, torch.cuda.get_device_capability(device), kernels.AVAILABLE)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        if config.runtime.compile is not False:
            from megalith.parallel.overlap.inductor import prepare_compiler  # imports the compiler: seconds

            prepare_compiler()
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS first starts
    if device.type == "cuda" or compiles(config, device):
        torch.use_deterministic_algorithms(config.train.deterministic)
        # All models of the process share one limit per function; beyond it torch raises.
        raise_recompile_limit(RECOMPILE_LIMIT)
    else:  # the same, without importing the compiler, which takes seconds
        torch.set_deterministic_debug_mode("error" if config.train.deterministic else "default")
    return device


def raise_cuda_connections() -> None:
    """Raise the number of CUDA's hardware queues from 8 to 32, unless the environment sets CUDA_DEVICE_MAX_CONNECTIONS.

    If a stream waits for another rank's flag, it blocks all streams in its hardware queue. CUDA reads the variable when
    it is initialized, which already happens when its devices are queried, so call this before that.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def check_fp8_device(config: RunConfig, capability: tuple[int, int], has_triton: bool) -> None:
    """Raise ConfigError if a GPU of this compute capability does not support the configured FP8 training."""
    train, version = config.train, ".".join(map(str, capability))
    if train.fp8_format is None:
        return
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but this GPU has compute capability {version}, and FP8 matmuls "
            "require 8.9; leave train.fp8_format out to train in bf16"
        )
    if train.fp8_recipe == "blockwise" and capability != BLOCK_CAPABILITY:
        raise ConfigError(
            f"train.fp8_recipe is blockwise, but this GPU has compute capability {version}, and only 9.0 supports "
            "scales per block of 128; set train.fp8_recipe to delayed or tensorwise"
        )
    if config.model.num_experts is not None and (capability != BLOCK_CAPABILITY or train.precision != "bf16"):
        raise ConfigError(
            f"train.fp8_format {train.fp8_format} with experts needs a GPU of compute capability 9.0 and "
            f"train.precision bf16, but this GPU has {version} and train.precision is {train.precision}; use such "
            "a GPU and precision, or remove train.fp8_format"
        )
    if not has_triton:
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but FP8 casts on a GPU need Triton, which "
            "is not installed; install PyTorch's build for this GPU, which includes Triton"
        )


def detect_machine(config: RunConfig, device: torch.device) -> Machine:
    """Describe the hardware of the job, identically on all ranks. Collective if there are several ranks."""
    compiled = device.type == "cuda" and compiles(config, device)
    memory, launch = 0, 0.0
    if device.type == "cuda":
        memory, launch = torch.cuda.get_device_properties(device).total_memory, launch_microseconds(device)
    if not dist.is_initialized():
        return Machine(compiled=compiled, memory=memory, launch=launch)
    host = zlib.crc32(f"{socket.gethostname()} {boot_id()}".encode())  # containers can share a host name
    nanoseconds = round(1000 * launch)
    local = torch.tensor([host, _obstacle_of_nvlink(device), memory, nanoseconds], device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    hosts, obstacles, memories, launches = torch.stack(gathered, 1).tolist()
    per_host = math.gcd(*(len(list(run)) for _, run in itertools.groupby(hosts)))
    worst = max(obstacles)
    return Machine(
        per_host,
        compiled,
        not worst,
        min(memories),
        len(hosts),
        no_nvlink=OBSTACLES[worst],
        launch=max(launches) / 1000,
    )


OBSTACLES = (
    "",
    "no NVLink",
    "neither NVML nor nvidia-smi reports the links between GPUs",
    "each process sees one GPU only",
    "the package cuda-bindings is not installed",
)
"""Reasons why a GPU's copy engines cannot access the memory of the other GPUs of the host."""


def _obstacle_of_nvlink(device: torch.device) -> int:
    """Return 0, or the index in OBSTACLES of the reason why the copy engines cannot access other GPUs."""
    if device.type != "cuda":
        return 1
    try:
        spec = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:  # the parent package cuda is missing too
        spec = None
    if spec is None:
        return 4
    gpus = {n: f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(torch.cuda.device_count())}
    local_gpu = gpus.pop(device.index)
    if not gpus:
        return 3
    links = read_links(local_gpu, gpus)
    if any(number not in links for number in gpus):
        return 2
    return 0 if all(link == NVLINK for link in links.values()) else 1
