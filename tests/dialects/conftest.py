"""What Accelerate keeps for a whole process ends with each test."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

NAMES = ("ACCELERATE_", "MEGATRON_LM_", "LOCAL_WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture(autouse=True)
def nothing_of_accelerates_stays() -> Iterator[None]:
    yield
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        del os.environ[name]
