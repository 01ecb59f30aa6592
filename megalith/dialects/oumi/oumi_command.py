"""`megalith oumi train|distributed|plan|migrate`: Oumi's commands for Oumi configurations.

    train -c X.yaml [--nproc N] [--format bin] [--training.max_steps=2 …]
    distributed torchrun [torchrun's options] [-m oumi train] -c X.yaml [--training.max_steps=2 …]
    plan -c X.yaml --gpus N [--device NAME]     estimate memory and time without devices or weights
    migrate old.yaml [--output new.yaml] [--megatron.tensor_model_parallel_size=8 …]

`distributed torchrun` detects the machines from SkyPilot, Polaris or Slurm; otherwise it uses all GPUs of this machine,
or as many processes as the layout needs if there is no GPU. These torchrun options override the detection: --nnodes,
--node_rank, --nproc_per_node (also gpu, cpu, auto), --master_addr, --master_port, --rdzv_endpoint, --rdzv_id,
--standalone, --max_restarts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.dialects.command_parser import CommandParser
from megalith.dialects.oumi.oumi_errors import oumi_key_errors
from megalith.dialects.oumi.oumi_file import read_configuration
from megalith.dialects.oumi.oumi_layout import LAYOUT, indivisible_world_size
from megalith.dialects.oumi.oumi_settings import OumiRun, translate_oumi
from megalith.errors import ConfigError, did_you_mean, nearest_of, printable

PORT = 8007  # Oumi's default
NO_EFFECT = (  # torchrun options without effect
    "rdzv-backend", "rdzv-conf", "monitor-interval", "local-addr", "role", "log-dir", "redirects", "tee", "start-method"
)  # fmt: skip
PRESET_OF = {  # published model → preset with the same shape, for `plan` without weights
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
    """The machines of a job, and the rank of this one."""

    nodes: int
    rank: int
    processes: int
    """Processes per machine."""
    address: str = "127.0.0.1"
    port: int = PORT


def run_command(words: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises MegalithError."""
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(f"unknown command `megalith oumi {words[0]}`{nearest_of(words[0], COMMANDS)}")
    return COMMANDS[words[0]](list(words[1:]))


def train_command(words: list[str]) -> int:
    """Train in this process, or with --nproc start ranks on this machine."""
    parser = CommandParser("megalith oumi train")
    _file_option(parser)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--format", choices=("safetensors", "bin"), default="safetensors")
    options, overrides = parser.parse_known_args(words)
    if options.nproc is not None:
        command = [*words]
        index = next(n for n, word in enumerate(command) if word.partition("=")[0] == "--nproc")
        del command[index : index + (1 if "=" in command[index] else 2)]
        return _launch(Machines(1, 0, options.nproc), command, options.config, overrides)
    from megalith.dialects.oumi.oumi_run import open_run, train_run, with_bin
    from megalith.launch.launcher import this_process
    from megalith.launch.stops import EXIT_CODES, exit_code

    process = this_process()
    run = translate_oumi(read_configuration(options.config, overrides), process.world_size)
    opened = open_run(run, process.world_size)
    if process.is_first:
        _print_notes(opened.notes)
    ended = train_run(with_bin(opened) if options.format == "bin" else opened).ended
    if process.is_first and EXIT_CODES[ended]:
        _print_notes(["to resume, repeat the command with --training.try_resume_from_last_checkpoint=True"])
    return exit_code(ended)


def _file_option(parser: CommandParser) -> None:
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
    """Check the configuration for the whole job, then start this machine's ranks. Returns the exit code."""
    from megalith.dialects.oumi.oumi_run import open_run
    from megalith.launch.launcher import launch
    from megalith.training.precheck import check_job

    world = machines.nodes * machines.processes
    run = translate_oumi(read_configuration(path, overrides), world)
    opened = open_run(run, world)
    is_multi_node = machines.nodes > 1

    def check(world_sizes: Sequence[int]) -> None:
        prompts = (
            {"rl.prompts": "train_dataset", "rl.reward_funcs": run.rewards} if run.trainer == "grpo" else {}
        )
        config = opened.config.with_settings(prompts) if prompts else opened.config
        skip_files = (lambda config, tokenizer: None) if prompts else None  # open_run has read them
        check_job(config, world_sizes, machines.processes, not is_multi_node, skip_files)

    return launch(
        machines.processes,
        ["-m", "megalith", "oumi", "train", *command],
        nnodes=str(machines.nodes),
        rdzv_endpoint=f"{machines.address}:{machines.port}" if is_multi_node else None,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        check=check,
    )


def distributed_command(words: list[str]) -> int:
    """Start the ranks of this machine in a multi-machine job."""
    if words[:1] != ["torchrun"]:
        raise ConfigError(
            f"megalith oumi distributed {' '.join(words[:1])} is not supported; use megalith oumi distributed torchrun"
        )
    parser = CommandParser("megalith oumi distributed torchrun")
    names = (
        "nnodes",
        "node-rank",
        "nproc-per-node",
        "master-addr",
        "master-port",
        "rdzv-endpoint",
        "rdzv-id",
    )
    for name in (*names, *NO_EFFECT):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("-m", dest="module")
    _file_option(parser)
    options, rest = parser.parse_known_args(words[1:])
    if options.module is not None and (options.module != "oumi" or rest[:1] != ["train"]):
        raise ConfigError(
            f"megalith oumi distributed torchrun starts only `-m oumi train`, not -m {options.module} "
            f"{' '.join(rest[:1])}; write -m oumi train"
        )
    command = rest[1:] if options.module is not None else rest
    overrides = [word for word in command if not word.startswith("--format")]
    run = translate_oumi(read_configuration(options.config, overrides))
    torchrun_options = vars(options)
    if no_effect := [f"--{name}" for name in NO_EFFECT if torchrun_options[name.replace("-", "_")]]:
        _print_notes([f"{', '.join(no_effect)} has no effect: Megalith starts the ranks, not torchrun"])
    machines = machines_of({} if options.standalone else os.environ, torchrun_options, run.model_parallel)
    if (world := machines.nodes * machines.processes) % run.model_parallel:
        sizes = run.tree["parallel"]
        raise ConfigError(indivisible_world_size(world, {axis: sizes[key] for axis, key in LAYOUT.items()}))
    command = ["-c", options.config, *command]
    return _launch(machines, command, options.config, overrides, options.rdzv_id, options.max_restarts)


def machines_of(environ: Mapping[str, str], options: Mapping[str, str | None], layout: int) -> Machines:
    """Return the machines of a job, detected as Oumi does.

    Args:
        environ: environment variables of the scheduler.
        options: torchrun's options, which override the environment.
        layout: processes per model replica (TP × PP × CP).

    Raises:
        ConfigError: the environment contradicts itself or the options.
    """
    detected, hosts = _detect_machines(environ, layout)
    host, _, port = (options.get("rdzv_endpoint") or "").partition(":")
    port = port or environ.get("MASTER_PORT", str(detected.port))
    gpus = detected.processes if hosts else _gpus()
    counts = {"gpu": gpus, "auto": gpus or layout, "cpu": os.cpu_count()}
    nproc = options.get("nproc_per_node") or str(detected.processes)
    texts = {
        "nodes": options.get("nnodes") or str(detected.nodes),
        "rank": options.get("node_rank") or str(detected.rank),
        "processes": str(counts.get(nproc, nproc)),
        "port": options.get("master_port") or port,
    }
    if wrong := {name: text for name, text in texts.items() if not text.isdigit()}:
        raise ConfigError(f"the job has {wrong}; these must be whole numbers")
    sizes = {name: int(text) for name, text in texts.items()}
    machines = Machines(**sizes, address=options.get("master_addr") or host or detected.address)
    if not machines.processes:
        raise ConfigError(f"--nproc-per-node is {nproc}, but this machine has no GPUs; set a number")
    if not machines.nodes or machines.rank >= machines.nodes:
        raise ConfigError(
            f"node rank {machines.rank} is invalid with {machines.nodes} machines; ranks count from 0"
        )
    world = machines.nodes * machines.processes
    for name, value in (("OUMI_NUM_NODES", machines.nodes), ("OUMI_TOTAL_NUM_GPUS", world)):
        if environ.get(name, str(value)) != str(value):
            raise ConfigError(
                f"{name} is {environ[name]} in the environment, but the job has {machines.nodes} machines with "
                f"{machines.processes} processes each, {world} in all; correct one of these numbers"
            )
    master = environ.get("OUMI_MASTER_ADDR")
    if master is not None and hosts and master not in hosts:
        raise ConfigError(
            f"OUMI_MASTER_ADDR is {master!r}, which is not one of the machines {', '.join(hosts)}; set "
            "OUMI_MASTER_ADDR to one of them"
        )
    return machines


def _detect_machines(environ: Mapping[str, str], layout: int) -> tuple[Machines, list[str]]:
    """Return the scheduler's machines and their addresses, or this machine and no addresses."""
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
            raise ConfigError(f"{environ['PBS_NODEFILE']}, named by PBS_NODEFILE, lists no machine")
        # Polaris has 4 GPUs per machine.
        return Machines(len(hosts), _number(environ, "PMI_RANK", 0), 4, hosts[0]), hosts
    gpus = _gpus()
    if "SLURM_NODELIST" in environ:
        _require(environ, "Slurm", "SLURM_JOBID")
        hosts = _slurm_hosts(environ["SLURM_NODELIST"])
        if len(hosts) > 1:
            _require(environ, "Slurm on several machines", "SLURM_NODEID")
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
        raise ConfigError(f"SLURM_NODELIST is {nodelist}, which scontrol cannot expand: {error}") from None
    return done.stdout.split()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _require(environ: Mapping[str, str], scheduler: str, *names: str) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        raise ConfigError(
            f"{scheduler} also sets {', '.join(missing)}, which the environment does not have; set "
            f"{', '.join(missing)}"
        )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)


def plan_command(words: list[str]) -> int:
    """Print the memory and the step time of the configuration's layout."""
    parser = CommandParser("megalith oumi plan")
    _file_option(parser)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--device", default="H100")
    options, overrides = parser.parse_known_args(words)
    run = translate_oumi(read_configuration(options.config, overrides), options.gpus)
    from megalith.planner.plan_text import GB, layout_cells, layout_details
    from megalith.planner.rates import rates_of
    from megalith.planner.search import planned

    with oumi_key_errors():
        config, gpus = planned_config(run), options.gpus or run.model_parallel
        _print_notes(run.notes)
        layout = planned(config, gpus, rates_of(options.device), 8)
    ms, tokens, mfu, *_ = layout_cells(layout)
    print(
        f"{gpus} {options.device}: {'fits' if layout.fits else 'does NOT fit'}, {layout.bytes / GB:.1f} GB on the "
        "fullest GPU"
    )
    print(f"{ms} ms per step without rollouts, {tokens} tokens/s/GPU, MFU {mfu} (causal)")
    print(layout_details(layout))
    return 0 if layout.fits else ConfigError.exit_code


def planned_config(run: OumiRun):
    """Return a configuration with the model's shape only, for estimates without weights."""
    from megalith.config import ModelConfig
    from megalith.config.presets import PRESETS

    name, notes = run.model_name, run.notes
    if Path(name).is_dir():
        from megalith.bridge.load import model_of

        shape = model_of(name).model_dump(exclude_unset=True)
    elif name in PRESET_OF:
        shape = dict(PRESETS[PRESET_OF[name]])
    else:
        raise ConfigError(
            f"model.model_name is {name}, which is not a local folder; without weights use one of "
            f"{', '.join(PRESET_OF)}{did_you_mean(name, PRESET_OF)}"
        )
    from megalith.dialects.oumi.oumi_run import pipeline_split

    if run.trainer == "grpo":  # enables RL, so that the reference model's memory counts
        run.tree["rl"] |= {"prompts": "train_dataset", "reward_funcs": run.rewards}
    config = run.config({"hidden_dropout": 0.0, "attention_dropout": 0.0} | shape)
    config = config.with_settings(
        pipeline_split(config, ModelConfig.model_validate(config.model.model_dump()), notes)
    )
    return config if config.train.train_iters else config.with_settings({"train.train_iters": 1})


def migrate_command(words: list[str]) -> int:
    """Convert a VERL_GRPO or TRL_GRPO configuration to MEGATRON_GRPO. Prints the diff and the notes."""
    from megalith.dialects.oumi.oumi_migration import migrated

    parser = CommandParser("megalith oumi migrate")
    parser.add_argument("file")
    parser.add_argument("--output")
    options, overrides = parser.parse_known_args(words)
    text, diff, notes = migrated(Path(options.file), overrides)
    print(diff, end="")
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


COMMANDS = {
    "train": train_command,
    "distributed": distributed_command,
    "plan": plan_command,
    "migrate": migrate_command,
}
