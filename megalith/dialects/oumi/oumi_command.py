"""`megalith oumi train|distributed|plan|migrate`: Oumi's commands on Oumi's configurations.

    train -c X.yaml [--nproc N] [--format bin] [--training.max_steps=2 …]
    distributed torchrun [torchrun's options] [-m oumi train] -c X.yaml [--training.max_steps=2 …]
    plan -c X.yaml --gpus N [--device NAME]     memory and time of its layout, without devices or weights
    migrate old.yaml [--output new.yaml] [--megatron.tensor_model_parallel_size=8 …]

`distributed torchrun` takes the machines from SkyPilot, Polaris or Slurm, else this one with all of its GPUs; without a
GPU it starts as many processes as the layout takes. torchrun's own options go before what was found: --nnodes,
--node_rank, --nproc_per_node (gpu, cpu, auto too), --master_addr, --master_port, --rdzv_endpoint, --rdzv_id,
--standalone, --max_restarts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megalith.dialects.oumi.oumi_meanings import LAYOUT, indivisible
from megalith.dialects.oumi.oumi_settings import OumiRun, in_keys, read_configuration, translate_oumi
from megalith.errors import ConfigError, did_you_mean, nearest_of, printable

PORT = 8007  # Oumi's
IDLE = (  # options of torchrun's that change nothing here
    "rdzv-backend", "rdzv-conf", "monitor-interval", "local-addr", "role", "log-dir", "redirects", "tee", "start-method"
)  # fmt: skip
SHAPES = {  # published models' names → presets of the same shape, for who has no weights: `plan`
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3.3-70b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama3-405b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
}


@dataclass(frozen=True)
class Machines:
    """Where a job runs."""

    nodes: int
    rank: int
    processes: int
    """On each."""
    address: str = "127.0.0.1"
    port: int = PORT


class OumiOptions(argparse.ArgumentParser):
    """The options of one of Oumi's commands."""

    def __init__(self, prog: str):
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command and its words. Raises MegalithError."""
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(f"there is no command `megalith oumi {words[0]}`{nearest_of(words[0], COMMANDS)}")
    return COMMANDS[words[0]](list(words[1:]))


def train_command(words: list[str]) -> int:
    """Trains in this process, which may be a rank, or starts some."""
    parser = OumiOptions("megalith oumi train")
    _file_option(parser)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--format", choices=("safetensors", "bin"), default="safetensors")
    own, overrides = parser.parse_known_args(words)
    if own.nproc is not None:
        command = [*words]
        at = next(n for n, word in enumerate(command) if word.partition("=")[0] == "--nproc")
        del command[at : at + (1 if "=" in command[at] else 2)]
        return _launch(Machines(1, 0, own.nproc), command, own.config, overrides)
    from megalith.dialects.oumi.oumi_run import open_run, train_run, with_bin
    from megalith.launch.launcher import this_process
    from megalith.launch.stops import EXIT_CODES, exit_code

    process = this_process()
    asked = translate_oumi(read_configuration(own.config, overrides), process.world_size)
    opened = open_run(asked, process.world_size)
    if process.is_first:
        _print_notes(opened.notes)
    ended = train_run(with_bin(opened) if own.format == "bin" else opened).ended
    if process.is_first and EXIT_CODES[ended]:
        _print_notes(["the same command with --training.try_resume_from_last_checkpoint=True goes on"])
    return exit_code(ended)


def _file_option(parser: OumiOptions) -> None:
    parser.add_argument("-c", "--config", required=True)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {printable(note)}", flush=True)


def _launch(
    machines: Machines,
    command: list[str],
    path: str,
    overrides: Sequence[str],
    rdzv_id: str | None = None,
    max_restarts: int = 0,
) -> int:
    """Starts the ranks of this machine, once the whole configuration is found to be right for the job."""
    from megalith.dialects.oumi.oumi_run import open_run
    from megalith.launch.launcher import launch
    from megalith.training.precheck import check_job

    world = machines.nodes * machines.processes
    asked = translate_oumi(read_configuration(path, overrides), world)
    opened = open_run(asked, world)
    several = machines.nodes > 1

    def check(world_sizes: Sequence[int]) -> None:
        prompts = (
            {"rl.prompts": "train_dataset", "rl.reward_funcs": asked.rewards}
            if asked.trainer == "grpo"
            else {}
        )
        config = opened.config.with_settings(prompts) if prompts else opened.config
        no_files = (lambda config, tokenizer: None) if prompts else None  # they are read already
        check_job(config, world_sizes, machines.processes, not several, no_files)

    return launch(
        machines.processes,
        ["-m", "megalith", "oumi", "train", *command],
        nnodes=str(machines.nodes),
        rdzv_endpoint=f"{machines.address}:{machines.port}" if several else None,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        check=check,
    )


def distributed_command(words: list[str]) -> int:
    """Starts this machine's share of a job's ranks."""
    if words[:1] != ["torchrun"]:
        raise ConfigError(
            f"megalith oumi distributed {' '.join(words[:1])}: there is torchrun, which starts the ranks here too"
        )
    parser = OumiOptions("megalith oumi distributed torchrun")
    names = (
        "nnodes",
        "node-rank",
        "nproc-per-node",
        "master-addr",
        "master-port",
        "rdzv-endpoint",
        "rdzv-id",
    )
    for name in (*names, *IDLE):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("-m", dest="module")
    _file_option(parser)
    own, rest = parser.parse_known_args(words[1:])
    if own.module is not None and (own.module != "oumi" or rest[:1] != ["train"]):
        raise ConfigError(
            f"megalith oumi distributed torchrun starts `-m oumi train`, not -m {own.module} {' '.join(rest[:1])}"
        )
    command = rest[1:] if own.module is not None else rest
    overrides = [word for word in command if not word.startswith("--format")]
    asked = translate_oumi(read_configuration(own.config, overrides))
    given = vars(own)
    if idle := [f"--{name}" for name in IDLE if given[name.replace("-", "_")]]:
        _print_notes([f"{', '.join(idle)}: the ranks are started by Megalith, on which it has no effect"])
    machines = machines_of({} if own.standalone else os.environ, given, asked.model_parallel)
    if (world := machines.nodes * machines.processes) % asked.model_parallel:
        sizes = asked.tree["parallel"]
        raise ConfigError(indivisible(world, {axis: sizes[key] for axis, key in LAYOUT.items()}))
    restarts = own.max_restarts
    return _launch(machines, ["-c", own.config, *command], own.config, overrides, own.rdzv_id, restarts)


def machines_of(environ: Mapping[str, str], given: Mapping[str, str | None], layout: int) -> Machines:
    """The machines of a job, as Oumi finds them; `given` are torchrun's options, `layout` the processes that a model
    takes. Raises ConfigError for an environment that contradicts itself."""
    found, hosts = _detected(environ, layout)
    host, _, port = (given.get("rdzv_endpoint") or "").partition(":")
    port = port or environ.get("MASTER_PORT", str(found.port))
    gpus = found.processes if hosts else _gpus()
    counts = {"gpu": gpus, "auto": gpus or layout, "cpu": os.cpu_count()}
    asked = given.get("nproc_per_node") or str(found.processes)
    numbers = {
        "nodes": given.get("nnodes") or str(found.nodes),
        "rank": given.get("node_rank") or str(found.rank),
        "processes": str(counts.get(asked, asked)),
        "port": given.get("master_port") or port,
    }
    if wrong := {name: text for name, text in numbers.items() if not text.isdigit()}:
        raise ConfigError(f"the job's numbers are {wrong}; they are whole numbers")
    read = {name: int(text) for name, text in numbers.items()}
    machines = Machines(**read, address=given.get("master_addr") or host or found.address)
    if not machines.processes:
        raise ConfigError(f"--nproc-per-node is {asked}, of which this machine has none; give a number")
    if not machines.nodes or machines.rank >= machines.nodes:
        raise ConfigError(
            f"node rank {machines.rank} of {machines.nodes} machines cannot be; ranks count from 0"
        )
    world = machines.nodes * machines.processes
    for name, here in (("OUMI_NUM_NODES", machines.nodes), ("OUMI_TOTAL_NUM_GPUS", world)):
        if environ.get(name, str(here)) != str(here):
            raise ConfigError(
                f"{name} is {environ[name]} in the environment, but the job has {machines.nodes} machines with "
                f"{machines.processes} processes each, {world} in all; correct one of them"
            )
    named = environ.get("OUMI_MASTER_ADDR")
    if named is not None and hosts and named not in hosts:
        raise ConfigError(f"OUMI_MASTER_ADDR is {named!r}, which is none of the machines {', '.join(hosts)}")
    return machines


def _detected(environ: Mapping[str, str], layout: int) -> tuple[Machines, list[str]]:
    """The machines that a scheduler names, else this one, and their addresses."""
    if "SKYPILOT_NODE_RANK" in environ:
        _require(environ, "SkyPilot", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
        hosts = environ["SKYPILOT_NODE_IPS"].replace(",", "\n").split()
        here = (_number(environ, "SKYPILOT_NODE_RANK"), _number(environ, "SKYPILOT_NUM_GPUS_PER_NODE"))
        return Machines(len(hosts), *here, hosts[0]), hosts
    if "PBS_NODEFILE" in environ:
        _require(environ, "Polaris", "PBS_JOBID")
        try:
            hosts = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").replace(",", "\n").split()
        except OSError as error:
            raise ConfigError(
                f"PBS_NODEFILE names {environ['PBS_NODEFILE']}, which cannot be read: {error}"
            ) from None
        if not hosts:
            raise ConfigError(f"{environ['PBS_NODEFILE']}, which PBS_NODEFILE names, has no machine in it")
        return Machines(
            len(hosts), _number(environ, "PMI_RANK", 0), 4, hosts[0]
        ), hosts  # 4 GPUs in each of Polaris
    gpus = _gpus()
    if "SLURM_NODELIST" in environ:
        _require(environ, "Slurm", "SLURM_JOBID")
        hosts = _slurm_hosts(environ["SLURM_NODELIST"])
        if len(hosts) > 1:
            _require(environ, "Slurm, of several machines,", "SLURM_NODEID")
        return Machines(len(hosts), _number(environ, "SLURM_NODEID", 0), gpus or layout, hosts[0]), hosts
    return Machines(1, 0, gpus or layout, environ.get("MASTER_ADDRESS", "127.0.0.1")), []


def _slurm_hosts(nodelist: str) -> list[str]:
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"SLURM_NODELIST is {nodelist}, which scontrol does not read: {error}") from None
    return done.stdout.split()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _require(environ: Mapping[str, str], who: str, *names: str) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        raise ConfigError(f"{who} sets {', '.join(missing)} too, which the environment does not have; set it")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment; it is a whole number")
    return int(text)


def plan_command(words: list[str]) -> int:
    """Prices the configuration's own layout."""
    parser = OumiOptions("megalith oumi plan")
    _file_option(parser)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--device", default="H100")
    own, overrides = parser.parse_known_args(words)
    asked = translate_oumi(read_configuration(own.config, overrides), own.gpus)
    from megalith.planner.plan_text import GB, layout_cells, layout_details
    from megalith.planner.rates import rates_of
    from megalith.planner.search import planned

    with in_keys():
        config, gpus = planned_config(asked), own.gpus or asked.model_parallel
        _print_notes(asked.notes)
        layout = planned(config, gpus, rates_of(own.device), 8)
    ms, tokens, mfu, *_ = layout_cells(layout)
    print(
        f"{gpus} {own.device}: {'fits' if layout.fits else 'does NOT fit'}, {layout.bytes / GB:.1f} GB on the fullest"
    )
    print(f"{ms} ms of training a step, {tokens} tokens/s/GPU, MFU {mfu} (causal), without the rollouts")
    print(layout_details(layout))
    return 0 if layout.fits else ConfigError.exit_code


def planned_config(asked: OumiRun):
    """The run of a published model's shape, without its weights, whose memory and time can be said."""
    from megalith.config import ModelConfig
    from megalith.config.presets import PRESETS

    name, notes = asked.model_name, asked.notes
    if Path(name).is_dir():
        from megalith.bridge.load import model_of

        shape = model_of(name).model_dump(exclude_unset=True)
    elif name in SHAPES:
        shape = dict(PRESETS[SHAPES[name]])
    else:
        raise ConfigError(
            f"model.model_name is {name}, which is no folder here; shapes are known of {', '.join(SHAPES)}"
            f"{did_you_mean(name, SHAPES)}"
        )
    from megalith.dialects.oumi.oumi_run import pipeline_split

    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | shape
    if asked.trainer == "grpo":  # the reference counts, the prompts do not
        asked.tree["rl"] |= {"prompts": "train_dataset", "reward_funcs": asked.rewards}
    config = asked.config(given)
    config = config.with_settings(
        pipeline_split(config, ModelConfig.model_validate(config.model.model_dump()), notes)
    )
    return config if config.train.train_iters else config.with_settings({"train.train_iters": 1})


def migrate_command(words: list[str]) -> int:
    """Prints, or writes, a configuration of VERL_GRPO or TRL_GRPO as one of MEGATRON_GRPO, and what changed."""
    from megalith.dialects.oumi.oumi_migration import migrated

    parser = OumiOptions("megalith oumi migrate")
    parser.add_argument("file")
    parser.add_argument("--output")
    own, overrides = parser.parse_known_args(words)
    text, diff, notes = migrated(Path(own.file), overrides)
    print(diff, end="")
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if own.output:
        Path(own.output).write_text(text, encoding="utf-8")
        print(f"wrote {own.output}", file=sys.stderr)
    return 0


COMMANDS = {
    "train": train_command,
    "distributed": distributed_command,
    "plan": plan_command,
    "migrate": migrate_command,
}
