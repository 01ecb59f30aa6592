"""`megalith bench NAME …`: train a workload, or run another benchmark.

`megalith bench WORKLOAD` runs `python -m megalith.bench.training_speed WORKLOAD`. Every other name runs another module
of this folder. The modules parse their own options.
"""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megalith.bench.workloads import LAYOUTS, WORKLOADS
from megalith.errors import ConfigError, did_you_mean

TRAINING = "training_speed"
OTHERS = {  # module by name
    "finetune": "fine_tuning_speed",
    "dynamic-context": "dynamic_context_speed",
    "posttrain": "post_training_speed",
    "grpo": "grpo_speed",
    "generate": "generation_speed",
    "serve": "serving_speed",
    "optimizers": "optimizer_speed",
    "mup": "mup_check",
    "checkpoint": "checkpoint_speed",
    "convert": "conversion_speed",
    "preprocess": "preprocessing_speed",
    "data": "data_speed",
    "attention": "attention_speed",
    "fp8": "fp8_speed",
}
GPU_ONLY = ("attention", "fp8")


def run_command(words: Sequence[str]) -> int:
    """Run the benchmark named by the first argument. Without arguments, or with --help, list all names.

    Raises:
        ConfigError: the name is unknown, or the benchmark needs a GPU and there is none.
    """
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in WORKLOADS and name not in OTHERS:
        hint = did_you_mean(name, [*WORKLOADS, *OTHERS]) or "; `megalith bench` lists all benchmarks"
        raise ConfigError(f"unknown benchmark {name!r}{hint}")
    wants_help = not {"-h", "--help"}.isdisjoint(words)
    if name in GPU_ONLY and not wants_help and not _has_gpu():
        raise ConfigError(
            f"`megalith bench {name}` measures kernels of a GPU, but torch finds none; run it on a machine with a GPU"
        )
    remaining_words = words[1:] if name in OTHERS else words
    program = sys.argv
    sys.argv = [f"megalith bench {name}", *remaining_words]
    try:
        runpy.run_module(f"megalith.bench.{OTHERS.get(name, TRAINING)}", run_name="__main__")
    finally:
        sys.argv = program
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def listing() -> str:
    """Return the names and descriptions of all benchmarks."""
    lines = [
        "usage: megalith bench WORKLOAD [--layout LAYOUT …] [--peer PEER …] [--help]",
        "       megalith bench NAME [--help]",
        "",
        "Benchmarks of this machine. A workload trains a model on the number of GPUs of its layout:",
        "",
    ]
    for name, workload in WORKLOADS.items():
        settings = workload["model"]
        lengths = " and ".join(
            str(workload[key]) for key in ("seq_length", "decoder_seq_length") if key in workload
        )
        layers = f", {settings['num_layers']} layers" if "num_layers" in settings else ""
        shape = f"{settings['preset']}{layers}, {workload['batch']} sequences of {lengths} per process"
        lines.append(f"  {name:20} {shape}, {workload['precision']}")
    lines += ["", "layouts by number of processes:", ""]
    by_size: dict[int, list[str]] = {}
    for name, layout in LAYOUTS.items():
        by_size.setdefault(layout["processes"], []).append(name)
    lines += [f"  {size:<4} {', '.join(names)}" for size, names in sorted(by_size.items())]
    lines += ["", "other benchmarks:", ""]
    lines += [f"  {name:20} {summary(module)}" for name, module in OTHERS.items()]
    return "\n".join(lines)


def summary(module: str) -> str:
    """Return the first sentence of a benchmark module's docstring, without importing the module."""
    source = Path(importlib.util.find_spec(f"megalith.bench.{module}").origin).read_text(encoding="utf-8")
    text = " ".join(ast.get_docstring(ast.parse(source)).split("\n\n")[0].split())
    return text.split(": `")[0].split(". ")[0].rstrip(".:")
