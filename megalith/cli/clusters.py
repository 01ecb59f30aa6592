"""`megalith doctor` and `megalith launch`: what a machine has and lacks, and the job files of clusters."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.parser import Arguments, group, leaf
from megalith.errors import ConfigError, printable
from megalith.io import atomic_file

if TYPE_CHECKING:
    from megalith.config import RunConfig
    from megalith.doctor.checks import Check
    from megalith.launch.cluster.cluster_job import ClusterJob


def add_cluster_commands(commands: argparse._SubParsersAction) -> None:
    parser = leaf(commands, "doctor", "what this machine has and lacks", doctor)
    parser.description = (
        "Checks this machine for training: software, GPUs and their links, shared memory, the output's disk, optional "
        "packages, ports. Exit code 1 where something is bad."
    )
    parser.add_argument("--output", default=".", help="folder on the disk that runs will write to")
    parser.add_argument("--reach", action="append", default=[], metavar="HOST:PORT",
                        help="also try to connect there, such as to the rendezvous on another machine")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="no measurements: no all-reduce, no disk speed")
    parser.add_argument("--json", action="store_true", help="print one object")
    _add_launch(group(commands, "launch", "write the job files of a cluster, or submit them"))


def doctor(args: Arguments) -> int:
    import torch

    from megalith.doctor import checks
    from megalith.doctor.connectivity import check_network, check_reachable, parse_endpoint
    from megalith.doctor.devices import check_devices
    from megalith.doctor.disk import check_disk

    for endpoint in args.reach:
        parse_endpoint(endpoint)  # before anything is measured
    found: list[Check] = []
    gpus = torch.cuda.device_count()

    def take(more) -> None:
        for check in more:
            found.append(check)
            if not args.json:
                print(_line(check), flush=True)

    take(checks.check_software())
    take(check_devices(measured=not args.quick))
    take([checks.check_shared_memory(gpus)])
    take(check_disk(Path(args.output), measured=not args.quick))
    take(checks.check_packages(gpus > 0))
    take(check_network(os.environ))
    take(check_reachable(endpoint) for endpoint in args.reach)
    worst = checks.worst_status(found)
    if args.json:
        print(
            json.dumps({"worst": worst, "checks": [check.to_json() for check in found]}, ensure_ascii=False)
        )
    else:
        counts = {state: sum(check.state == state for check in found) for state in ("good", "warn", "bad")}
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return int(worst == checks.BAD)


def _line(check: Check) -> str:
    do = f"\n{'':26}→ {check.advice}" if check.advice else ""
    return f"{check.state:<5} {check.name:<19} {printable(check.finding)}{printable(do, keep=chr(10))}"


def _add_launch(launch: argparse._SubParsersAction) -> None:
    for system, text in (("slurm", "a Slurm batch file"), ("kubernetes", "Kubernetes manifests")):
        parser = leaf(launch, system, f"write {text} for a run, and submit it", launch_job)
        parser.description = (
            f"Prints {text} for a run; --submit hands it over. The run is checked by the trainer's own rules first. "
            "`--section.key value` changes its settings, as to `train`."
        )
        parser.set_defaults(system=system, takes_settings=True)
        parser.add_argument("run_file", help="the run file")
        parser.add_argument("--nodes", type=int, required=True, help="machines")
        parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs, and processes, of each")
        parser.add_argument(
            "--device", metavar="NAME", help="the GPUs, as `plan` names them: the job has to fit them"
        )
        parser.add_argument("--program", choices=("train", "sft", "dpo", "distill", "grpo"), default="train")
        parser.add_argument("--name", help="the job's name (default: made of the run file's)")
        parser.add_argument(
            "--grace", type=int, help="seconds for a last save (default: by the model's size)"
        )
        parser.add_argument("--max-restarts", type=int, default=3)
        parser.add_argument("--cpus", type=int, help="CPU cores of a node")
        parser.add_argument("--memory", help="of a node, as the system writes it: 900G, 900Gi")
        parser.add_argument("--image", help="container image")
        parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
        parser.add_argument("--volume", action="append", default=[], metavar="SOURCE:/PATH",
                            help="a claim, or for Slurm's containers a folder, and where the job sees it")  # fmt: skip
        parser.add_argument("--efa", type=int, default=0, metavar="N", help="N EFA devices a node (AWS)")
        parser.add_argument("--before", action="append", default=[], metavar="'preprocess …'",
                            help="a command of megalith to run before, as a job of its own")  # fmt: skip
        parser.add_argument("--after", action="append", default=[], metavar="'export-hf …'", help="and after")
        parser.add_argument(
            "--write", metavar="FOLDER", help="write the files there instead of printing them"
        )
        parser.add_argument("--submit", action="store_true", help="hand them to sbatch or kubectl")
        OPTIONS[system](parser)


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time", help="limit, as 24:00:00; the job saves before it and is queued again")
    parser.add_argument("--partition", dest="queue")
    parser.add_argument("--account")
    parser.add_argument(
        "--switches", dest="topology", help="of the network that the nodes may be spread over"
    )
    parser.add_argument("--array", metavar="SECTION.KEY=A,B,…", help="a run of its own for each value")
    parser.set_defaults(namespace=None)


def _kubernetes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=("trainjob", "pytorchjob", "jobset"), default="trainjob")
    parser.add_argument("--namespace")
    parser.add_argument("--queue", help="Kueue's")
    parser.add_argument(
        "--topology",
        metavar="LABEL",
        help="nodes with the same value of it are near each other: with --queue all have it, else they are preferred",
    )
    parser.set_defaults(time=None, account=None, array=None)


OPTIONS = {"slurm": _slurm_options, "kubernetes": _kubernetes_options}


def launch_job(args: Arguments) -> int:
    from megalith.launch.cluster.kubernetes import kubernetes_files, submit_manifests, text_of
    from megalith.launch.cluster.slurm import slurm_files, submit

    job, array = _cluster_job(args)
    if args.system == "slurm":
        files = slurm_files(job, array)
    else:
        manifests = kubernetes_files(job, args.kind, Path(args.run_file).read_text(encoding="utf-8"))
        files = {name: text_of(documents) for name, documents in manifests.items()}
    if args.write is not None:
        for name, text in files.items():
            with atomic_file(Path(args.write) / name) as file:
                file.write(text.encode())
            print(Path(args.write) / name)
    if args.submit:
        print("\n".join(submit(files) if args.system == "slurm" else submit_manifests(job, manifests)))
    elif args.write is None:
        between = "---\n" if args.system == "kubernetes" else ""  # one text of all documents
        texts = [f"# {name}\n{text}" if len(files) > 1 else text for name, text in files.items()]
        print(between.join(texts), end="")
        if len(files) > 1:
            print(
                "note: these are to begin each after the one before, which --submit sees to; --write FOLDER gives them "
                "file by file",
                file=sys.stderr,
            )
    return 0


def _cluster_job(args: Arguments) -> tuple[ClusterJob, tuple[str, list[str]] | None]:
    """The job that is asked for, and the array's setting and values. Raises ConfigError where it cannot be trained."""
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
    every = [RunConfig.load(args.run_file, [*settings, *words]) for words in changed]
    for each in every:
        parameters, more = _check(each, args.nodes * args.gpus_per_node, args.gpus_per_node, args.device)
    grace = args.grace or cluster.grace_seconds(parameters, args.nodes)
    if not (parameters or args.grace):
        more.append(
            f"the grace to save is {grace} s, whatever the model's size: give --grace, twice what a save takes"
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
            f"--nodes is {args.nodes} and --gpus-per-node {args.gpus_per_node}; both count from 1"
        )
    for name, least in (("grace", 1), ("max_restarts", 0), ("cpus", 1), ("efa", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give {least} or more")


def _step(option: str, given: str) -> tuple[str, ...]:
    """The words of a job before or after. Raises ConfigError for what megalith would not take when its turn comes."""
    from megalith.cli.main import build_parser

    try:
        words = shlex.split(given)
        with contextlib.redirect_stdout(io.StringIO()):  # of a help
            parsed, more = build_parser().parse_known_args(words or [""])
        if more and "run" in parsed and not parsed.takes_settings:  # others read their own options
            parsed.parser.refuse(more)
    except SystemExit:
        raise ConfigError(
            f"{option} is {given!r}, which prints a help and does nothing; name what to do"
        ) from None
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{option} is {given!r}, no command of megalith: {error}") from None
    return tuple(words)


def _array(given: str | None) -> tuple[str, list[str]] | None:
    if given is None:
        return None
    setting, _, values = given.partition("=")
    if not re.fullmatch(r"\w+\.\w+", setting) or not values:
        raise ConfigError(f"--array is {given!r}; give a setting and its values, as optim.lr=1e-4,3e-4")
    if setting in ("train.output_dir", "checkpoint.load"):
        raise ConfigError(
            f"--array sets {setting}, of which each of its runs has one of its own; name another setting"
        )
    return setting, values.split(",")


UNKNOWN_VOCABULARY = 32_000


def _check(
    config: RunConfig, world_size: int, gpus_per_node: int, device: str | None
) -> tuple[int, list[str]]:
    """The model's parameters, and notes. Raises the MegalithError with which the trainer would refuse the run, and a
    ConfigError for one that does not fit GPUs like `device`, or, without it, any.

    What stands on the cluster's disks alone is left out of the check, and said so.
    """
    from megalith.planner.counts import count_parameters
    from megalith.planner.fit import require_fit, warnings_without_device
    from megalith.planner.layout import build_layout, with_auto
    from megalith.planner.rates import rates_of
    from megalith.training.build import prepare

    notes, stands_in = [], {}
    tokenizer, weights = config.data.tokenizer_model, config.model.init_from
    if tokenizer is not None and not os.path.exists(tokenizer):
        notes.append(
            f"data.tokenizer_model {tokenizer} is not on this machine, and its vocabulary not checked"
        )
        stands_in = {"data.tokenizer_type": None, "data.tokenizer_model": None}
        stands_in["model.vocab_size"] = config.model.vocab_size or UNKNOWN_VOCABULARY
    if weights is not None and not os.path.exists(weights):
        notes.append(f"model.init_from {weights} is not on this machine, and the model is not checked")
        return 0, notes
    prepared = prepare(config.with_settings(stands_in | {"checkpoint.load": None}), world_size).config
    if device is not None:
        rates = rates_of(device)
        machine = rates.machine(world_size, gpus_per_node)
        require_fit(build_layout(with_auto(prepared, world_size, machine)[0], world_size), rates)
    elif config.runtime.device != "cpu":
        notes += warnings_without_device(prepared, world_size, gpus_per_node)
    return count_parameters(prepared.model).total, notes
