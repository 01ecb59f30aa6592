"""What is set once for the whole process before a run, and nowhere else."""

from __future__ import annotations

import os

import torch

from megalith.config import RunConfig


def prepare_process(config: RunConfig, device: torch.device) -> None:
    """Deterministic kernels where asked for, and no TF32 in a run that is fp32."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS first starts
    torch.use_deterministic_algorithms(config.train.deterministic)
