"""`megalith accelerate config`: ask the questions of Accelerate's Megatron-LM guide and write a configuration file.

The questions have the guide's order and wording. An empty line takes the default; from a pipe each line is an answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megalith.errors import ConfigError

YES = {"yes": True, "y": True, "true": True, "1": True, "no": False, "n": False, "false": False, "0": False}
OTHER = (
    "use `accelerate config` for that; `megalith accelerate config` writes files for the Megatron-LM plugin"
)


def run_wizard(words: list[str]) -> int:
    """Ask the questions and write the file. Raises ConfigError for an invalid answer from a pipe."""
    parser = argparse.ArgumentParser(prog="megalith accelerate config", description=__doc__)
    parser.add_argument("--config_file", type=Path, default=default_file(), help="the file to write")
    file = parser.parse_args(words).config_file
    content = ask_all()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    print(f"wrote {file}; start a script with: megalith accelerate launch SCRIPT.py")
    return 0


def default_file() -> Path:
    """Return the path of the file that Accelerate's launcher reads: below HF_HOME, else XDG_CACHE_HOME, else
    ~/.cache.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def ask_all() -> dict[str, Any]:
    """Ask the guide's eleven questions, then those of `accelerate config`. Returns the file's content."""
    ask("In which compute environment are you running?", "This machine", one_of("This machine"))
    kind = ask("Which type of machine are you using?", "Multi-GPU", one_of("Multi-GPU", "multi-CPU"))
    machines = ask("How many different machines will you use?", 1, count)
    refuse(ask("Do you want to use DeepSpeed/FSDP?", "No", truth), True)
    refuse(ask("Do you want to use Megatron-LM?", "Yes", truth), False)
    tp = ask("What is the Tensor Parallelism degree? [1-8]", 2, count)
    sequence = ask("Do you want to enable Sequence Parallelism?", "No", truth)
    pp = ask("What is the Pipeline Parallelism degree? [1-8]", 2, count)
    dp = ask("What is the Data Parallelism degree? [1-8]", 2, count)
    choices = ("SELECTIVE", "FULL", "NONE")
    recompute = ask(
        f"Where to perform activation checkpointing? {list(choices)}", "SELECTIVE", one_of(*choices)
    )
    choices = ("SEQUENTIAL", "UNIFORM")
    partition = ask(
        f"Where to perform activation partitioning? {list(choices)}", "SEQUENTIAL", one_of(*choices)
    )
    micro_batches = ask("What is the number of micro-batches?", 1, count) if pp > 1 else 1
    sharded = ask("Do you want to use distributed optimizer which shards optimizer state and gradients across "
                  "data parallel ranks?", "No", truth)  # fmt: skip
    clipping = ask("What is the gradient clipping value based on global L2 Norm (0 to disable)?", 1.0, float)
    processes = ask("How many processes (GPUs) should be used for distributed training?", tp * pp * dp, count)
    if processes != tp * pp * dp:
        raise ConfigError(
            f"{processes} processes are not tensor {tp} × pipeline {pp} × data {dp} = {tp * pp * dp}; change one of "
            "these numbers"
        )
    precision = ask(
        "Do you wish to use mixed precision? [no/fp16/bf16]", "bf16", one_of("no", "fp16", "bf16")
    )
    plugin = {
        "gradient_clipping": clipping,
        "learning_rate_decay_iters": 320000,
        "num_micro_batches": micro_batches,
        "pp_degree": pp,
        "recompute_activations": recompute != "NONE",
        "sequence_parallelism": sequence,
        "tp_degree": tp,
    }
    plugin |= {"checkpoint_num_layers": 1} if recompute == "FULL" else {}
    plugin |= {"distribute_checkpointed_activations": True} if partition == "UNIFORM" else {}
    plugin |= {"use_distributed_optimizer": True} if sharded else {}
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MEGATRON_LM",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "megatron_lm_config": {f"megatron_lm_{name}": value for name, value in plugin.items()},
        "mixed_precision": precision,
        "num_machines": machines,
        "num_processes": processes,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
    }
    if machines > 1:
        content["machine_rank"] = ask("What is the rank of this machine?", 0, below(machines))
        host = "What is the IP address of the machine that will host the main process?"
        content["main_process_ip"] = ask(host, "127.0.0.1", str)
        port = "What is the port you will use to communicate with the main process?"
        content["main_process_port"] = ask(port, 29500, count)
    if kind == "multi-CPU":
        print(
            "without GPUs the processes communicate with gloo; on a machine with GPUs, hide them from the script with "
            "CUDA_VISIBLE_DEVICES= (use_cpu stays false, because Accelerate would start only one process)"
        )
    return content


def ask(question: str, default: Any, read: Callable[[str], Any]) -> Any:
    """Ask until the answer is valid (on a terminal). Returns the answer converted by `read`."""
    while True:
        print(f"{question}\n> ", end="", flush=True)
        answer = sys.stdin.readline()
        if not sys.stdin.isatty():
            print(answer.strip() or default)
        try:
            return read(answer.strip() or str(default))
        except ValueError as error:
            message = f"{answer.strip()!r} is not a valid answer to {question!r}: {error}"
            if not sys.stdin.isatty():
                raise ConfigError(message) from None
            print(message)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a function that converts an answer to one of the choices, ignoring case."""

    def read(answer: str) -> str:
        match = next((choice for choice in choices if choice.lower() == answer.lower()), None)
        if match is None:
            raise ValueError(f"answer with one of {', '.join(choices)} ({OTHER})")
        return match

    return read


def truth(answer: str) -> bool:
    """Parse yes or no."""
    if answer.lower() not in YES:
        raise ValueError("answer yes or no")
    return YES[answer.lower()]


def count(answer: str) -> int:
    """Parse a whole number of at least 1."""
    if not answer.isdecimal() or int(answer) < 1:
        raise ValueError("answer with a whole number of at least 1")
    return int(answer)


def below(bound: int) -> Callable[[str], int]:
    """Return a function that parses a whole number from 0 to bound - 1."""

    def read(answer: str) -> int:
        if not answer.isdecimal() or int(answer) >= bound:
            raise ValueError(
                f"answer with a whole number from 0 to {bound - 1}, because there are {bound} machines"
            )
        return int(answer)

    return read


def refuse(answer: bool, unwanted: bool) -> None:
    """Raise ConfigError if the answer is `unwanted`, which selects something other than Megatron-LM."""
    if answer is unwanted:
        raise ConfigError(OTHER)
