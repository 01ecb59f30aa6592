"""Results of `megalith doctor` and the software checks: versions, driver, optional packages and shared memory."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

from megalith.errors import ConfigError, install_line

GOOD, WARN, BAD = "good", "warn", "bad"


@dataclass(frozen=True)
class Check:
    """The result of one check: a line `state name finding`, with advice unless it is good."""

    name: str
    state: Literal["good", "warn", "bad"]
    finding: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields of `megalith doctor --json`."""
        return {"name": self.name, "state": self.state, "found": self.finding, "do": self.advice}


def make_check(name: str, finding: str, passed: bool, advice: str, otherwise: str = WARN) -> Check:
    """Return a check whose state is good if it passed, otherwise `otherwise`, with the advice."""
    return Check(name, GOOD if passed else otherwise, finding, "" if passed else advice)


def worst_status(checks: Sequence[Check]) -> str:
    return max((check.state for check in checks), key=(GOOD, WARN, BAD).index, default=GOOD)


SUPPORTED = {
    "Python": ((3, 11), (3, 14)),
    "torch": ((2, 11), (2, 13)),
}
"""Oldest supported version and newest tested version."""

DRIVERS = {
    (12, 6): (560, 28),
    (12, 8): (570, 26),
    (12, 9): (575, 51),
    (13, 0): (580, 65),
}
"""The NVIDIA Linux driver released with each CUDA version that PyTorch is built for. Older drivers of the same major
version also work, down to MINIMUM_DRIVERS, but kernels compiled at run time (Triton) may need this one."""

MINIMUM_DRIVERS = {12: (525, 60), 13: (580, 65)}

EXTRAS = {
    "gpu": (("pynvml",), "GPU health in the log, and links between GPUs"),
    "tokenizers": (("sentencepiece", "tiktoken"), "the tokenizers of these names"),
    "datasets": (("datasets", "pyarrow"), "preprocessing from the Hugging Face hub and parquet"),
    "hf": (("datasets", "transformers"), "conversations in parquet, imports compared with transformers"),
    "accelerate": (("accelerate", "transformers"), "Accelerate's scripts"),
    "math": (("math_verify",), "the reward math_verify"),
    "evaluate": (("lm_eval",), "benchmarks by `megalith evaluate --tasks`"),
    "grammar": (("llguidance",), "JSON schemas in generation"),
    "log": (("tensorboard", "wandb"), "TensorBoard and Weights & Biases"),
    "remote": (("fsspec", "s3fs", "gcsfs"), "checkpoints and data in object stores"),
}
"""Modules and purpose of each optional extra."""


def parse_version(text: str) -> tuple[int, int]:
    """Return major and minor version: `2.13.0+cu130` → (2, 13)."""
    major, minor, *_ = [*map(int, re.findall(r"\d+", text)), 0, 0]
    return major, minor


def check_software() -> Iterator[Check]:
    """Check the versions of Python and torch. CUDA is checked by `check_driver`."""
    for name, installed in (("Python", sys.version.split()[0]), ("torch", torch.__version__)):
        oldest, newest = (".".join(map(str, each)) for each in SUPPORTED[name])
        if parse_version(installed) < SUPPORTED[name][0]:
            yield Check(name, BAD, installed, f"install {name} {oldest} to {newest}")
        else:
            advice = f"newer than {newest}, the newest tested version: if something fails, install {newest}"
            yield make_check(name, installed, parse_version(installed) <= SUPPORTED[name][1], advice)


def check_driver(driver: str | None, cuda: str) -> Check:
    """Check that the NVIDIA driver supports torch's CUDA version."""
    name, built = "driver", parse_version(cuda)
    if driver is None:
        return Check(
            name, WARN, f"unknown version; torch has CUDA {cuda}", "install nvidia-smi or nvidia-ml-py"
        )
    finding, minimum = f"{driver}, for torch's CUDA {cuda}", MINIMUM_DRIVERS.get(built[0])
    if minimum and parse_version(driver) < minimum:
        oldest = ".".join(map(str, minimum))
        advice = f"install a driver of {oldest} or newer, or a torch for an older CUDA"
        return Check(name, BAD, finding, advice)
    released_with = DRIVERS.get(built)
    if released_with and parse_version(driver) < released_with:
        text = ".".join(map(str, released_with))
        advice = f"CUDA {cuda} came with {text}: kernels compiled at run time may fail"
        return Check(name, WARN, finding, advice)
    return Check(name, GOOD, finding)


def check_packages(has_gpu: bool) -> Iterator[Check]:
    """Check the optional packages. The advice for a missing one is the command that installs it."""
    for extra, (modules, use) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        installed = ", ".join(_with_version(module) for module in modules if module not in missing)
        if not missing:
            yield Check(f"[{extra}]", GOOD, installed)
        else:
            finding = f"{', '.join(missing)} absent{f'; {installed}' if installed else ''} ({use})"
            needed = extra == "gpu" and has_gpu
            advice = f"{'install' if needed else 'if wanted'}: {install_line(extra)}"
            yield Check(f"[{extra}]", WARN if needed else GOOD, finding, advice)


def _with_version(module: str) -> str:
    try:
        return f"{module} {version('nvidia-ml-py' if module == 'pynvml' else module)}"
    except PackageNotFoundError:
        return module


SHARED_MEMORY = 2**30  # bytes of /dev/shm that ranks and data workers need


def check_shared_memory(gpus: int, folder: str = "/dev/shm") -> Check:
    """Check /dev/shm. NCCL's ranks on one machine communicate through it, and data workers pass batches through it."""
    name = folder
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check(name, WARN, error.strerror or str(error), "mount a tmpfs there")
    finding = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    advice = "give the container more: docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir in memory"
    return make_check(name, finding, usage.free >= SHARED_MEMORY, advice, BAD if gpus > 1 else WARN)


def check_megatron_bridge_available() -> None:
    """Check that the installed Python and torch are supported. Oumi calls it by this name.

    Raises:
        ConfigError: the installed Python or torch is too old.
    """
    if failed := [check for check in check_software() if check.state == BAD]:
        raise ConfigError(*(f"{check.name} is {check.finding}; {check.advice}" for check in failed))
