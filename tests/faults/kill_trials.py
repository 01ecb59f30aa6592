"""Randomized kills of real runs: `python tests/faults/kill_trials.py --trials 100 [--seed 1] [--json FILE]`.

In a trial a job of two ranks is started, a random rank of it is killed (SIGKILL) at a random moment, and the job is
started again, one to three times over; then it runs to its end. What it leaves has to be, bit for bit, what a job
leaves that was never killed: weights, optimizer state, and each step once in the metrics. The other rank has to end by
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

from ranks import Ranks, records, steps, stored, words

from megalith.runtime.pulse import Pulse

STEPS = 30
SIZE = 2
SURVIVORS_END_WITHIN = 60.0  # seconds
PHASE_BYTES = 16


def command(output: Path, background: bool) -> list[str]:
    return words(
        output,
        train__train_iters=STEPS,
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
    inner = {name: getattr(Pulse, name) for name in ("beat", "begin_long")}

    def write(self) -> None:
        memory[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES] = self.phase.encode().ljust(PHASE_BYTES)

    def beat(self, step: int, phase: str) -> None:
        inner["beat"](self, step, phase)
        write(self)

    def begin_long(self, phase: str) -> None:
        inner["begin_long"](self, phase)
        write(self)

    Pulse.beat, Pulse.begin_long = beat, begin_long


def phase_of(path: Path, rank: int, output: Path) -> str:
    """What a killed rank was doing."""
    text = path.read_bytes()[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES].strip(b"\0 ").decode()
    in_background = text == "training" and any((output / "checkpoints").glob("*.tmp"))
    return "training, with a save in the background" if in_background else text or "joining"


def run(output: Path, background: bool, phases: Path, kill_after: float | None, chance: random.Random) -> str:
    """Starts the job; kills a rank of it after so many seconds. Returns in which phase, "" if it had ended."""
    phases.write_bytes(bytes(SIZE * PHASE_BYTES))
    prepare = partial(tell_phase, path=phases)
    running = Ranks(command(output, background), SIZE, output.with_suffix(".log"), prepare=prepare)
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the sums")
    args = parser.parse_args(arguments)
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-trials-"))
    wanted, seconds = {}, {}
    for background in (False, True):
        output = folder / f"straight-{background}"
        begun = time.monotonic()
        run(output, background, folder / "phases", None, chance)
        seconds[background], wanted[background] = time.monotonic() - begun, stored(output, STEPS)
    kills: Counter[str] = Counter()
    losses = 0
    for trial in range(args.trials):
        background, output = trial % 2 == 1, folder / f"trial-{trial}"
        met = []
        for _ in range(chance.randint(1, 3)):
            phase = run(
                output, background, folder / "phases", chance.uniform(0, 0.9 * seconds[background]), chance
            )
            met += [phase] if phase else []
        run(output, background, folder / "phases", None, chance)
        same = stored(output, STEPS) == wanted[background] and steps(output) == list(range(1, STEPS + 1))
        same = same and [r["step"] for r in records(output / "evaluations.jsonl")] == [5, 10, 15, 20, 25, 30]
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
