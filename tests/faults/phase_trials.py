"""Random signals and kills in random phases of training, compiled training and GRPO; the job is then started again.

`python tests/faults/phase_trials.py --trials 100 --seed 1` prints a line for each trial and a table. With
`--results FILE` an interrupted campaign goes on. In a trial, a rank or the launcher is stopped or killed in one to
three starts of a job; the next start runs to its end. It has to leave what a job leaves that nothing stops.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of what all tests have, where this is run as a program
from in_process_trials import finished, markdown
from test_phases import CASES, finish, start, state_of

TASKS = {"training": "training", "compiled": "compiled training", "grpo": "GRPO"}
SIGNALS = "SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGKILL"
Stop = tuple[int, str, int, str]  # rank, phase, number, how


def trial_of(seed: int, number: int) -> tuple[str, list[Stop]]:
    """Task and stops of one trial, the same in each campaign with this seed."""
    chance = random.Random(f"{seed} {number} phases")
    task = chance.choice(sorted({command.__name__ for command, *_ in CASES}))
    phases = [phase for command, phase, _ in CASES if command.__name__ == task] + ["step", "save"]
    stops = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        to = chance.choice(["", "", "launcher "])
        stops.append(
            (chance.randrange(2), chance.choice(phases), chance.randint(1, 4), to + chance.choice(SIGNALS))
        )
    return task, stops


def run(command, output: Path, stops: list[Stop]) -> tuple[int, int]:
    """Start a job once per stop and once more. Return the number of stops that happened, and the last exit code."""
    happened, marks = 0, output.with_suffix(".marks")
    for stop in stops:
        shutil.rmtree(marks, ignore_errors=True)
        finish(start(command(output), output, [stop]))
        happened += len(list(marks.iterdir()))
    return happened, finish(start(command(output), output, []))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, from 0")
    parser.add_argument("--results", type=Path, help="JSONL file; trials that it contains are not repeated")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="phase-trials-"))
    commands = {command.__name__: command for command, *_ in CASES}
    done, wanted = finished(args.results, args.seed), {}
    for number in range(args.first, args.trials):
        if number in done:
            continue
        task, stops = trial_of(args.seed, number)
        if task not in wanted:
            (folder / task).mkdir()
            assert run(commands[task], folder / task / "run", [])[1] == 0
            wanted[task] = state_of(folder / task / "run")
        output = folder / f"trial-{number}" / "run"
        output.parent.mkdir()
        happened, code, same = 0, 0, False
        try:
            happened, code = run(commands[task], output, stops)
            same = code == 0 and state_of(output) == wanted[task]
        except (OSError, subprocess.TimeoutExpired) as error:
            output.with_suffix(".error").write_text(str(error))
        result = {"seed": args.seed, "trial": number, "task": task, "stops": stops}
        result |= {"happened": happened, "code": code, "equal": same}
        done[number] = result
        print(json.dumps(result), flush=True)
        if args.results:
            with open(args.results, "a") as file:
                file.write(json.dumps(result) + "\n")
        if same:
            shutil.rmtree(output.parent)
    print(table(list(done.values())))
    return int(not all(each["equal"] for each in done.values()))


def table(results: list[dict]) -> str:
    """Sums of a campaign by task, as the table of docs/reliability.md."""
    rows = []
    for task in (*TASKS, "all"):
        chosen = [each for each in results if task in ("all", each["task"])]
        planned, stops = sum(len(each["stops"]) for each in chosen), sum(each["happened"] for each in chosen)
        name = TASKS.get(task, task)
        rows.append([name, len(chosen), planned, stops, sum(not each["equal"] for each in chosen)])
    return markdown(("Task", "Trials", "Planned stops", "Stops", "Different bits"), rows)


if __name__ == "__main__":
    sys.exit(main())
