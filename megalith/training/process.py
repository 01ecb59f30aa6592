"""What is set once for the whole process before a run, and nowhere else."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import socket
import zlib

import torch
import torch.distributed as dist

from megalith.config import RunConfig
from megalith.config.rules.fastest import Machine
from megalith.errors import ConfigError
from megalith.hardware import pick_device
from megalith.launch.parent import boot_id
from megalith.ops import kernels
from megalith.parallel.apply import compiles
from megalith.planner.topology import NVLINK, read_links

RECOMPILE_LIMIT = 64  # shapes and modes (training, evaluation) of one layer's code


FP8_CAPABILITY, BLOCK_CAPABILITY = (8, 9), (9, 0)  # of GPUs with FP8 matmuls, and with scales of 128 × 128


def prepare_process(config: RunConfig, local_rank: int) -> torch.device:
    """The device of process `local_rank` of this machine, as pick_device gives it, ready for the run: deterministic
    kernels where asked for, no TF32 in a run that is fp32, room to compile several models."""
    if config.parallel.symmetric_memory_groups == "auto" or config.parallel.direct_axes:
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
        # Every model of this process counts against one limit per function; past it torch refuses to go on.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    else:  # the same, but that it does not import the compiler to tell it too: seconds
        torch.set_deterministic_debug_mode("error" if config.train.deterministic else "default")
    return device


def raise_cuda_connections() -> None:
    """A stream that awaits another rank's flag holds up the streams that share its queue to the device; the driver's
    own choice is 8 queues. Read when CUDA starts, which it does when it is asked for its devices."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def check_fp8_device(config: RunConfig, capability: tuple[int, int], has_triton: bool) -> None:
    """Raises ConfigError where a GPU of this compute capability cannot train in the FP8 that is asked for."""
    train, found = config.train, ".".join(map(str, capability))
    if train.fp8_format is None:
        return
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but this GPU has compute capability {found}, and FP8 matmuls "
            "take 8.9; leave it out to train in bf16"
        )
    if train.fp8_recipe == "blockwise" and capability != BLOCK_CAPABILITY:
        raise ConfigError(
            f"train.fp8_recipe is blockwise, but this GPU has compute capability {found}, and only 9.0 multiplies "
            "blocks of 128 with scales of their own; choose delayed or tensorwise"
        )
    if config.model.num_experts is not None and (capability != BLOCK_CAPABILITY or train.precision != "bf16"):
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format} with experts on a GPU of compute capability {found} in "
            f"{train.precision}, but torch's grouped FP8 matmul takes 9.0 and gives bf16; set train.precision to bf16 "
            "on such a GPU, or leave train.fp8_format out"
        )
    if not has_triton:
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but its casts on a GPU take Triton, which is not installed; "
            "install PyTorch's build for this GPU, which brings it"
        )


def detect_machine(config: RunConfig, device: torch.device) -> Machine:
    """What the job's ranks have between them, alike on all of them. A collective call, where there are several."""
    compiled = device.type == "cuda" and compiles(config, device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if not dist.is_initialized():
        return Machine(compiled=compiled, memory=memory)
    host = zlib.crc32(f"{socket.gethostname()} {boot_id()}".encode())  # names alone repeat among containers
    own = torch.tensor([host, _obstacle_of_nvlink(device), memory], device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    hosts, obstacles, memories = torch.stack(every, 1).tolist()
    per_host = math.gcd(*(len(list(run)) for _, run in itertools.groupby(hosts)))
    worst = max(obstacles)
    return Machine(per_host, compiled, not worst, min(memories), len(hosts), no_nvlink=OBSTACLES[worst])


OBSTACLES = (
    "",
    "no NVLink",
    "neither NVML nor nvidia-smi says what links the GPUs",
    "each process sees one GPU alone",
    "the package cuda-bindings is not installed",
)
"""What keeps a GPU's copy engines from the memory of the others of its host."""


def _obstacle_of_nvlink(device: torch.device) -> int:
    """Which of OBSTACLES keeps this rank's GPU from the others that this process sees."""
    if device.type != "cuda":
        return 1
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:  # there is no package cuda either
        found = None
    if found is None:
        return 4
    gpus = {n: f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(torch.cuda.device_count())}
    own = gpus.pop(device.index)
    if not gpus:
        return 3
    links = read_links(own, gpus)
    if any(number not in links for number in gpus):
        return 2
    return 0 if all(link == NVLINK for link in links.values()) else 1
