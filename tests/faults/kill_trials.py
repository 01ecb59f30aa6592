"""Randomized kills of real runs: `python tests/faults/kill_trials.py --trials 100 [--seed 1] [--json FILE]`.

In a trial a job of two ranks is started, a random rank of it is killed (SIGKILL) at a random moment, and the job is
started again, one to three times over; then it runs to its end. What it leaves has to be, bit for bit, what a job
leaves that was never killed: weights, optimizer state, losses and norms of all steps. The other rank has to end by
itself; where it still waits for the first meeting, it is ended as a launcher would. Half save in the background.
Prints a line for each trial and the sums.
"""

import argparse
import json
import mmap
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of what all tests have, where this is run as a program
from ranks import Ranks, records, stored, words

from megalith.launch.heartbeat import Heartbeat

SIZE = 2
SURVIVORS_END_WITHIN = 60.0  # seconds
PHASE_BYTES = 16


def command(output: Path, steps: int, background: bool) -> list[str]:
    return words(
        output,
        train__train_iters=steps,
        train__eval_interval=5,
        train__eval_iters=2,
        data__split="80,20",
        model__hidden_dropout=0.1,
        checkpoint__save_interval=1,
        checkpoint__keep_last=2,
        checkpoint__async_save=background,
    )


def tell_phase(rank: int, path: Path) -> None:
    """Writes what the rank is doing to its place in the file at `path`, where it outlives the process."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    inner = {name: getattr(Heartbeat, name) for name in ("beat", "begin_long")}

    def write(self) -> None:
        memory[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES] = self.phase.encode().ljust(PHASE_BYTES)

    def beat(self, step: int, phase: str) -> None:
        inner["beat"](self, step, phase)
        write(self)

    def begin_long(self, phase: str) -> None:
        inner["begin_long"](self, phase)
        write(self)

    Heartbeat.beat, Heartbeat.begin_long = beat, begin_long


def phase_of(path: Path, rank: int, output: Path) -> str:
    """What a killed rank was doing."""
    text = path.read_bytes()[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES].strip(b"\0 ").decode()
    in_background = text == "training" and any((output / "checkpoints").glob("*.tmp"))
    return "training, with a save in the background" if in_background else text or "joining"


def run(words: list[str], output: Path, phases: Path, kill_after: float | None, chance: random.Random) -> str:
    """Starts the job; kills a rank of it after so many seconds. Returns in which phase, "" if it had ended."""
    phases.write_bytes(bytes(SIZE * PHASE_BYTES))
    prepare = partial(tell_phase, path=phases)
    running = Ranks(words, SIZE, output.with_suffix(".log"), prepare=prepare)
    victim = chance.randrange(SIZE)
    if kill_after is not None:
        running.processes[victim].join(kill_after)
        if running.processes[victim].exitcode is None:
            running.send(signal.SIGKILL, [victim])
            if "joining" in (phase_of(phases, rank, output) for rank in range(SIZE)):
                running.send(signal.SIGKILL)
            codes = running.end(SURVIVORS_END_WITHIN)
            return phase_of(phases, victim, output) if codes[victim] == -signal.SIGKILL else ""
    codes = running.end()
    assert codes == [0] * SIZE, f"exit codes {codes}:\n{running.text()}"
    return ""


def left_by(output: Path, last_step: int) -> tuple:
    """What a run has left, apart from what the clock says: the last state, and the figures of each step."""
    figures = [
        (record["step"], record["loss"], record["grad_norm"]) for record in records(output / "metrics.jsonl")
    ]
    return stored(output, last_step), figures, records(output / "evaluations.jsonl")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30, help="of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the sums")
    args = parser.parse_args(arguments)
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-trials-"))
    phases = folder / "phases"
    wanted, seconds = {}, {}
    for background in (False, True)[: args.trials]:
        output = folder / f"straight-{background}"
        begun = time.monotonic()
        run(command(output, args.steps, background), output, phases, None, chance)
        seconds[background] = time.monotonic() - begun
        wanted[background] = left_by(output, args.steps)
    kills: Counter[str] = Counter()
    losses = 0
    for trial in range(args.trials):
        background, output = trial % 2 == 1, folder / f"trial-{trial}"
        job = command(output, args.steps, background)
        moments = [chance.uniform(0, 0.9 * seconds[background]) for _ in range(chance.randint(1, 3))]
        while not (met := [phase for at in moments if (phase := run(job, output, phases, at, chance))]):
            shutil.rmtree(output)  # it had ended before, sooner than the one that was not killed
            moments = [moments[0] / 2]
        run(job, output, phases, None, chance)
        same = left_by(output, args.steps) == wanted[background]
        losses += not same
        kills.update(met)
        print(
            f"trial {trial}: killed in {met or 'no phase'}: {'equal' if same else f'LOST {output}'}",
            flush=True,
        )
        if same:
            shutil.rmtree(output)
    sums = {"trials": args.trials, "kills": sum(kills.values()), "by_phase": dict(kills.most_common())}
    sums["losses"] = losses
    print(json.dumps(sums))
    if args.json:
        args.json.write_text(json.dumps(sums, indent=1) + "\n")
    if not losses:
        shutil.rmtree(folder)
    return int(losses > 0)


if __name__ == "__main__":
    sys.exit(main())
