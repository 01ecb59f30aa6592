"""Failures of ranks in a job that restarts in its processes: what it leaves has to be what it leaves without them.

`python tests/faults/in_process_trials.py --trials 100 --seed 1` makes random plans of failures, prints a line for each
and a table. With `--results FILE` an interrupted campaign goes on. Each trial's job starts once; the launcher replaces
the ranks that fail.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of what all tests have, where this is run as a program
from forked import Forked
from in_process_job import MARKS, PLAN, POINTS, RESTART_LIMIT
from kill_trials import left_by
from ranks import words

JOB = Path(__file__).with_name("in_process_job.py")
Failure = tuple[int, str, int, str]  # rank, point, number, how
PATIENCE = 1800.0  # seconds for a trial of a campaign, which runs at low priority
LAYOUTS = {
    "data": {},
    "sharded": {"parallel__data_parallel_sharding_strategy": "optim_grads_params"},
    "tensor × data": {"parallel__tensor_model_parallel_size": 2},
    "pipeline × data": {"parallel__pipeline_model_parallel_size": 2},
    "pipeline × tensor": {
        "parallel__tensor_model_parallel_size": 2,
        "parallel__pipeline_model_parallel_size": 2,
    },
    "context × data": {"parallel__context_parallel_size": 2},
}


def job(
    output: Path, layout: str, steps: int, max_restarts: int = 9, spares: int = 0, **settings: object
) -> list[str]:
    settings = {
        "train__train_iters": steps,
        "train__eval_interval": 4,
        "train__eval_iters": 1,
        "data__split": "80,20",
        "model__hidden_dropout": 0.1,
        "checkpoint__save_interval": 5,
        "checkpoint__memory_interval": 2,
        "runtime__distributed_timeout_minutes": 0.2,
        "log__log_interval": 1,
        **LAYOUTS[layout],
        **settings,
    }
    return [
        *words(output, **settings),
        "--nproc",
        "4",
        "--max-restarts",
        str(max_restarts),
        "--spares",
        str(spares),
    ]


def start(command: Sequence[str], output: Path, failures: Sequence[Failure], limit: float | None) -> Forked:
    marks = output.with_suffix(".marks")
    marks.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PLAN: json.dumps(failures), MARKS: str(marks)}
    if limit is not None:
        environment[RESTART_LIMIT] = str(limit)
    return Forked([JOB, *command], output.with_suffix(".log"), env=environment)


def run(
    output: Path,
    layout: str,
    steps: int,
    failures: Sequence[Failure],
    limit: float | None = None,
    patience: float = 240.0,
    **settings: object,
) -> str:
    """Run a job to its end, within `patience` seconds. Return its output. `limit` is that of an in-process restart."""
    running = start(job(output, layout, steps, **settings), output, failures, limit)
    try:
        code = running.wait(patience)
    finally:
        running.kill()
    text = output.with_suffix(".log").read_text()
    assert code == 0, f"exit code {code}\n{text}"
    return text


def happened(output: Path) -> int:
    return len(list(output.with_suffix(".marks").iterdir()))


def restarts(text: str) -> tuple[int, int]:
    """Numbers of replaced ranks and of restarts of all processes."""
    return len(re.findall("^replacing rank", text, re.M)), len(re.findall("^restarting ", text, re.M))


def random_failures(chance: random.Random, steps: int) -> list[Failure]:
    failures = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        point = chance.choice(["step", *POINTS])
        how = chance.choices(["kill", "kill after", "raise", "abort", "stop", "sleep"], [8, 4, 2, 1, 1, 1])[0]
        most = {
            "build": 2,
            "meeting": 2,
            "connecting": 2,
            "fetch": 1,
            "restore": 1,
            "save": 2,
            "evaluation": 3,
        }
        number = chance.randint(1, most.get(point, steps if point == "step" else 6))
        if point in ("build", "meeting", "connecting"):
            number = 2  # 1 is before the first step, after which ranks can be replaced
        if point == "step":
            how = "kill" if how == "kill after" else how
        failures.append((chance.randrange(4), point, number, how))
    return failures


def trial_of(seed: int, number: int, steps: int) -> tuple[str, bool, list[Failure]]:
    """Layout, background saves and failures of one trial, the same in each campaign with this seed."""
    chance = random.Random(f"{seed} {number}")
    return chance.choice(list(LAYOUTS)), chance.random() < 0.5, random_failures(chance, steps)


def finished(results: Path | None, seed: int) -> dict[int, dict]:
    """The trials of this seed that an earlier campaign has written to `results`."""
    lines = results.read_text().splitlines() if results and results.exists() else []
    return {each["trial"]: each for each in map(json.loads, lines) if each["seed"] == seed}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, from 0")
    parser.add_argument("--results", type=Path, help="JSONL file; trials that it contains are not repeated")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="in-process-trials-"))
    done, wanted = finished(args.results, args.seed), {}
    for number in range(args.first, args.trials):
        if number in done:
            continue
        layout, background, failures = trial_of(args.seed, number, args.steps)
        settings = {"checkpoint__async_save": background, "runtime__distributed_timeout_minutes": 0.5}
        kind = layout, background
        if kind not in wanted:
            output = folder / f"{'-'.join(map(str, kind)).replace(' × ', '-')}"
            run(output, layout, args.steps, [], patience=PATIENCE, **settings)
            wanted[kind] = left_by(output, args.steps)
        output = folder / f"trial-{number}"
        try:
            text = run(output, layout, args.steps, failures, 40.0, PATIENCE, **settings)
            same, (replaced, restarted) = left_by(output, args.steps) == wanted[kind], restarts(text)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            same, replaced, restarted = False, 0, 0
            output.with_suffix(".error").write_text(str(error))
        result = {"seed": args.seed, "trial": number, "layout": layout, "background": background}
        result |= {"failures": failures, "happened": happened(output)}
        result |= {"replaced": replaced, "restarted": restarted, "equal": same}
        done[number] = result
        print(json.dumps(result), flush=True)
        if args.results:
            with open(args.results, "a") as file:
                file.write(json.dumps(result) + "\n")
        if same:
            shutil.rmtree(output)
    print(table(list(done.values())))
    return int(not all(each["equal"] for each in done.values()))


def table(results: Sequence[dict]) -> str:
    """Sums of a campaign by layout, as the table of docs/reliability.md."""
    rows = []
    for layout in (*LAYOUTS, "all"):
        chosen = [each for each in results if layout in ("all", each["layout"])]
        sums = [sum(each[name] for each in chosen) for name in ("happened", "replaced", "restarted")]
        rows.append([layout, len(chosen), *sums, sum(not each["equal"] for each in chosen)])
    heads = "Layout", "Trials", "Failures", "Ranks replaced", "Restarts of all processes", "Different bits"
    return markdown(heads, rows)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
