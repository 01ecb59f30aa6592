"""`megalith bench NAME …`: a workload of training, or one of the other benchmarks, each a module that runs by itself.

`megalith bench WORKLOAD` is `python -m megalith.bench.training_speed WORKLOAD`, and so are the others: a name stands
for a module of this folder, which reads its own options.
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
OTHERS = {  # what is measured besides training: its module
    "finetune": "fine_tuning_speed",
    "grpo": "grpo_speed",
    "generate": "generation_speed",
    "checkpoint": "checkpoint_speed",
    "convert": "conversion_speed",
    "preprocess": "preprocessing_speed",
    "attention": "attention_speed",
    "fp8": "fp8_speed",
}
OF_GPUS = ("attention", "fp8")


def run_command(words: Sequence[str]) -> int:
    """Runs what the words behind `megalith bench` name; without a name, or with --help, lists all names. Raises
    ConfigError for a name that there is not."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in WORKLOADS and name not in OTHERS:
        hint = did_you_mean(name, [*WORKLOADS, *OTHERS]) or "; `megalith bench` lists them"
        raise ConfigError(f"there is no benchmark {name!r}{hint}")
    if name in OF_GPUS and not _has_gpu():
        raise ConfigError(f"`megalith bench {name}` measures kernels of a GPU, and torch finds none here")
    given = words[1:] if name in OTHERS else words
    program = sys.argv
    sys.argv = [f"megalith bench {name}", *given]
    try:
        runpy.run_module(f"megalith.bench.{OTHERS.get(name, TRAINING)}", run_name="__main__")
    finally:
        sys.argv = program
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def listing() -> str:
    """The names of all benchmarks, and what each measures."""
    lines = [
        "usage: megalith bench WORKLOAD [--layout LAYOUT …] [--peer PEER …] [--help]",
        "       megalith bench NAME [--help]",
        "",
        "How fast this machine is. A workload is a model that is trained, on as many GPUs as its layout takes:",
        "",
    ]
    for name, workload in WORKLOADS.items():
        settings = workload["model"]
        lengths = " and ".join(
            str(workload[key]) for key in ("seq_length", "decoder_seq_length") if key in workload
        )
        layers = f", {settings['num_layers']} layers" if "num_layers" in settings else ""
        shape = f"{settings['preset']}{layers}, {workload['batch']} sequences of {lengths} a process"
        lines.append(f"  {name:20} {shape}, {workload['precision']}")
    lines += ["", "layouts, and the processes they take:", ""]
    by_size: dict[int, list[str]] = {}
    for name, layout in LAYOUTS.items():
        by_size.setdefault(layout["processes"], []).append(name)
    lines += [f"  {size:<4} {', '.join(names)}" for size, names in sorted(by_size.items())]
    lines += ["", "other names:", ""]
    lines += [f"  {name:20} {summary(module)}" for name, module in OTHERS.items()]
    return "\n".join(lines)


def summary(module: str) -> str:
    """The first sentence of a module of this folder, which is not imported for it."""
    source = Path(importlib.util.find_spec(f"megalith.bench.{module}").origin).read_text(encoding="utf-8")
    text = " ".join(ast.get_docstring(ast.parse(source)).split("\n\n")[0].split())
    return text.split(": `")[0].split(". ")[0].rstrip(".:")
