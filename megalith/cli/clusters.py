"""`megalith doctor`: checks of this machine; `megalith launch`: job files for clusters."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.json_output import add_json_option, print_json
from megalith.cli.parser import Arguments
from megalith.errors import ConfigError, printable
from megalith.io import atomic_file

if TYPE_CHECKING:
    from megalith.config import RunConfig
    from megalith.doctor.checks import Check
    from megalith.launch.cluster.cluster_job import ClusterJob


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine for training: software, GPUs and their links, shared memory, the "
        "output's disk, optional packages, ports. Exit code 1 if a check fails."
    )
    parser.add_argument("--output", default=".", help="folder on the disk that runs will write to")
    parser.add_argument("--reach", action="append", default=[], metavar="HOST:PORT",
                        help=("also try to connect to this address, such as the rendezvous on "
"another machine"))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="skip measurements (all-reduce, disk speed)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run_doctor(args: Arguments) -> int:
    import torch

    from megalith.doctor import checks
    from megalith.doctor.connectivity import check_network, check_reachable, parse_endpoint
    from megalith.doctor.devices import check_devices
    from megalith.doctor.disk import check_disk

    for endpoint in args.reach:
        parse_endpoint(endpoint)  # before anything is measured
    checks_done: list[Check] = []
    gpus = torch.cuda.device_count()

    def take(more) -> None:
        for check in more:
            checks_done.append(check)
            if not args.json:
                print(_line(check), flush=True)

    take(checks.check_software())
    take(check_devices(measured=not args.quick))
    take([checks.check_shared_memory(gpus)])
    take(check_disk(Path(args.output), measured=not args.quick))
    take(checks.check_packages(gpus > 0))
    take(check_network(os.environ))
    take(check_reachable(endpoint) for endpoint in args.reach)
    worst = checks.worst_status(checks_done)
    if args.json:
        print_json({"worst": worst, "checks": [check.to_json() for check in checks_done]})
    else:
        counts = {
            state: sum(check.state == state for check in checks_done) for state in ("good", "warn", "bad")
        }
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(worst == checks.BAD)


def _line(check: Check) -> str:
    do = f"\n{'':26}→ {check.advice}" if check.advice else ""
    return f"{check.state:<5} {check.name:<19} {printable(check.finding)}{printable(do, keep=chr(10))}"


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    _add_launch_arguments(parser, "slurm", "a Slurm batch file")
    parser.add_argument(
        "--time", help="time limit, for example 24:00:00; the job saves before the limit and is requeued"
    )
    parser.add_argument("--partition", dest="queue")
    parser.add_argument("--account")
    parser.add_argument(
        "--switches", dest="topology", help="maximum number of network switches between the nodes"
    )
    parser.add_argument("--array", metavar="SECTION.KEY=A,B,…", help="start one run per value")
    parser.set_defaults(namespace=None)


def add_kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    _add_launch_arguments(parser, "kubernetes", "Kubernetes manifests")
    parser.add_argument("--kind", choices=("trainjob", "pytorchjob", "jobset"), default="trainjob")
    parser.add_argument("--namespace")
    parser.add_argument("--queue", help="Kueue's queue")
    parser.add_argument(
        "--topology",
        metavar="LABEL",
        help=(
            "node label whose equal values mark nodes that are near each other. A requirement "
            "with --queue, otherwise a preference"
        ),
    )
    parser.set_defaults(time=None, account=None, array=None)


def _add_launch_arguments(parser: argparse.ArgumentParser, system: str, files: str) -> None:
    parser.description = (
        f"Print {files} for a run, or submit it with --submit. The run is checked as the trainer "
        "would. `--section.key value` overrides its settings, as for `train`."
    )
    parser.set_defaults(system=system, takes_settings=True)
    add = parser.add_argument
    add("run_file", help="run file")
    add("--nodes", type=int, required=True, help="number of nodes")
    add("--gpus-per-node", type=int, default=8, help="GPUs per node; each gets a process")
    add("--device", metavar="NAME", help="check that the job fits these GPUs, named as in `plan`")
    add("--program", choices=("train", "sft", "dpo", "kto", "reward", "distill", "grpo"), default="train")
    add("--name", help="name of the job (default: derived from the run file's)")
    add("--grace", type=int, help="seconds for a last save (default: by the model's size)")
    add("--max-restarts", type=int, default=3)
    add("--cpus", type=int, help="CPU cores per node")
    add("--memory", help="memory per node, in the scheduler's notation: 900G, 900Gi")
    add("--image", help="container image")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    add("--volume", action="append", default=[], metavar="SOURCE:/PATH",
        help="claim (or folder, for Slurm's containers) and its mount path")  # fmt: skip
    add("--efa", type=int, default=0, metavar="N", help="EFA devices per node (AWS)")
    add("--before", action="append", default=[], metavar="'preprocess …'",
        help="megalith command to run before the job, as a job of its own")  # fmt: skip
    add("--after", action="append", default=[], metavar="'export-hf …'",
        help="megalith command to run after the job, as a job of its own")  # fmt: skip
    add("--write", metavar="FOLDER", help="write the files there instead of printing them")
    add("--submit", action="store_true", help="submit the files with sbatch or kubectl")
    add_json_option(parser, "files (text by name), written (paths), submitted (lines of sbatch or kubectl)")


def launch_job(args: Arguments) -> int:
    from megalith.launch.cluster.kubernetes import kubernetes_files, submit_manifests, text_of
    from megalith.launch.cluster.slurm import slurm_files, submit

    job, array = _cluster_job(args)
    if args.system == "slurm":
        files = slurm_files(job, array)
    else:
        manifests = kubernetes_files(job, args.kind, Path(args.run_file).read_text(encoding="utf-8"))
        files = {name: text_of(documents) for name, documents in manifests.items()}
    written, submitted = [], []
    if args.write is not None:
        for name, text in files.items():
            with atomic_file(Path(args.write) / name) as file:
                file.write(text.encode())
            written.append(Path(args.write) / name)
            if not args.json:
                print(written[-1])
    if args.submit:
        submitted = submit(files) if args.system == "slurm" else submit_manifests(job, manifests)
    if args.json:
        print_json({"files": files, "written": written, "submitted": submitted})
    elif args.submit:
        print("\n".join(submitted))
    elif args.write is None:
        between = "---\n" if args.system == "kubernetes" else ""  # one text of all documents
        texts = [f"# {name}\n{text}" if len(files) > 1 else text for name, text in files.items()]
        print(between.join(texts), end="")
        if len(files) > 1:
            print(
                "note: each job must start after the previous one has ended, which --submit ensures; --write FOLDER "
                "writes one file per job",
                file=sys.stderr,
            )
    return 0


def _cluster_job(args: Arguments) -> tuple[ClusterJob, tuple[str, list[str]] | None]:
    """Return the job, and the array's setting and values. Raises ConfigError if it cannot be trained."""
    from megalith.cli.training import check_source, implied_settings
    from megalith.config import RunConfig
    from megalith.launch.cluster import cluster_job as cluster

    settings = [*args.settings, *implied_settings(args.program)]
    config = RunConfig.load(args.run_file, settings)
    check_source(args.program, config)
    array = _array(args.array)
    name = args.name or cluster.job_name(args.run_file)
    cluster.check_name(name)
    _check_numbers(args)
    resumes = cluster.check_resumes(config)
    volumes = cluster.parse_volumes(args.volume)
    run_file, notes = args.run_file, []
    if args.system == "kubernetes":
        notes = cluster.check_on_volumes(config, volumes)
    elif args.image is not None:
        run_file = cluster.path_in_container(run_file, volumes)
        notes = cluster.check_on_volumes(config, volumes, "containers")
    notes += cluster.check_within_nodes(config, args.gpus_per_node)
    changed = [[f"--{array[0]}", value] for value in array[1]] if array else [[]]
    configs = [RunConfig.load(args.run_file, [*settings, *words]) for words in changed]
    for each in configs:
        parameters, more = _check(each, args.nodes * args.gpus_per_node, args.gpus_per_node, args.device)
    grace = args.grace or cluster.grace_seconds(parameters, args.nodes)
    if not (parameters or args.grace):
        more.append(
            f"the grace period is {grace} s, because the model's size is unknown; set --grace to "
            "twice the time of a save"
        )
    for note in [*notes, *more]:
        print(f"note: {printable(note)}", file=sys.stderr)
    job = cluster.ClusterJob(
        name=name,
        program=args.program,
        run_file=run_file,
        settings=(*args.settings, *([] if array else resumes)),
        output=config.train.output_dir,
        nodes=args.nodes,
        gpus=args.gpus_per_node,
        grace=grace,
        restarts=args.max_restarts,
        time=args.time,
        cpus=args.cpus,
        memory=args.memory,
        image=args.image,
        variables=cluster.parse_variables(args.env),
        volumes=volumes,
        queue=args.queue,
        account=args.account,
        topology=args.topology,
        efa=args.efa,
        namespace=args.namespace,
        before=tuple(_step("--before", words) for words in args.before),
        after=tuple(_step("--after", words) for words in args.after),
    )
    return job, array


def _check_numbers(args: Arguments) -> None:
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise ConfigError(
            f"--nodes is {args.nodes} and --gpus-per-node {args.gpus_per_node}, but both must be at least 1"
        )
    for name, minimum in (("grace", 1), ("max_restarts", 0), ("cpus", 1), ("efa", 0)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be at least {minimum}")


def _step(option: str, text: str) -> tuple[str, ...]:
    """Parse a command for --before or --after into its arguments. Raises ConfigError if it is invalid."""
    from megalith.cli.main import build_parser

    try:
        words = shlex.split(text)
        with contextlib.redirect_stdout(io.StringIO()):  # of --help
            parsed, more = build_parser(words).parse_known_args(words or [""])
        if more and "run" in parsed and not parsed.takes_settings:  # other commands parse their own options
            parsed.parser.refuse(more)
    except SystemExit:
        raise ConfigError(
            f"{option} is {text!r}, which only prints a help text; use a command that runs something"
        ) from None
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{option} is {text!r}, which is not a command of megalith: {error}") from None
    return tuple(words)


def _array(text: str | None) -> tuple[str, list[str]] | None:
    if text is None:
        return None
    setting, _, values = text.partition("=")
    if not re.fullmatch(r"\w+\.\w+", setting) or not values:
        raise ConfigError(f"--array is {text!r}; write a setting and its values, such as optim.lr=1e-4,3e-4")
    if setting in ("train.output_dir", "checkpoint.load"):
        raise ConfigError(
            f"--array sets {setting}, which is set automatically for each of its runs; choose another setting"
        )
    return setting, values.split(",")


UNKNOWN_VOCABULARY = 32_000


def _check(
    config: RunConfig, world_size: int, gpus_per_node: int, device: str | None
) -> tuple[int, list[str]]:
    """Validate a run. Returns the model's number of parameters (0 if unknown), and notes.

    A tokenizer or weights that are missing on this machine may be on the cluster; they are skipped, with a note.

    Raises:
        MegalithError: as the trainer would.
        ConfigError: the job does not fit `device`. Without `device`: weights and optimizer state exceed the memory of
            the largest GPU.
    """
    from megalith.planner.counts import count_parameters
    from megalith.planner.fit import require_fit, warnings_without_device
    from megalith.planner.layout import build_layout
    from megalith.planner.memory_choices import with_auto
    from megalith.planner.rates import rates_of
    from megalith.training.build import prepare

    notes, substitutes = [], {}
    tokenizer, weights = config.data.tokenizer_model, config.model.init_from
    if tokenizer is not None and not os.path.exists(tokenizer):
        notes.append(
            f"data.tokenizer_model {tokenizer} is not on this machine, so its vocabulary is not checked"
        )
        substitutes = {"data.tokenizer_type": None, "data.tokenizer_model": None}
        substitutes["model.vocab_size"] = config.model.vocab_size or UNKNOWN_VOCABULARY
    if weights is not None and not os.path.exists(weights):
        notes.append(f"model.init_from {weights} is not on this machine, so the model is not checked")
        return 0, notes
    prepared = prepare(config.with_settings(substitutes | {"checkpoint.load": None}), world_size).config
    if device is not None:
        rates = rates_of(device)
        machine = rates.machine(world_size, gpus_per_node)
        require_fit(build_layout(with_auto(prepared, world_size, machine)[0], world_size), rates)
    elif config.runtime.device != "cpu":
        notes += warnings_without_device(prepared, world_size, gpus_per_node)
    return count_parameters(prepared.model).total, notes
