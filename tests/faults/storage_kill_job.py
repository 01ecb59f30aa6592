"""Two ranks save together; one is killed at a chosen moment. Run as a program: `storage_kill_job.py FOLDER`.

A rank is a forked child. What Python's audit events tell of (opening and renaming files, making and removing folders)
is counted in the one that is to die, so every phase of a save is met without knowing how it is written. The kernel
kills inside a write when a file would grow over a limit. What is left is loaded, then saved into again.

Prints a line of JSON for each trial: who was killed where, and what was found.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megalith.checkpoint import RunRecord, Saver, load_model, open_checkpoint
from megalith.comm.collectives import Axis

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
PATIENCE = 20.0  # seconds that a rank may outlive the killed one
WRITE_LIMITS = (0, 100, 9000)


def model(step: int) -> nn.Module:
    """Four tensors that tell their step."""
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))


def record(step: int) -> RunRecord:
    return RunRecord(step=step, consumed_samples=step, config={})


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def found_step(folder: Path) -> int:
    """The step that loads, which is as it was saved."""
    checkpoint = open_checkpoint(folder, ("model",))
    loaded = model(0)
    load_model(checkpoint, loaded)
    assert equal(loaded, model(checkpoint.manifest.step)), "what was loaded was never saved"
    return checkpoint.manifest.step


def save_as_rank(folder: Path, meeting: Path, rank: int, background: bool, kill) -> None:
    """What a child does: step 2 after step 1, with the first deleted."""
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    world = Axis(2, rank, dist.group.WORLD)
    saver = Saver(folder / "checkpoints", world, keep_last=1, background=background)
    saver.save(record(1), model(1), None)
    saver.completed_saves(wait=True)
    if kill is not None:
        kill()
    saver.save(record(2), model(2), None)
    if kill is die:
        die()
    saver.completed_saves(wait=True)
    assert saver.last.error is None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_event(number: int):
    """Begins to count events; dies at that number."""
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in EVENTS:
            if seen == number:
                die()
            seen += 1

    return lambda: sys.addaudithook(hook)


def at_byte(number: int):
    """From now on the kernel kills this process when it writes a file past that byte."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

    return limit


def trial(base: Path, victim: int, background: bool, kill) -> dict:
    """Exit codes of the ranks, and the step found after."""
    folder, meeting = base / "run", base / "meeting"
    shutil.rmtree(folder, ignore_errors=True)
    meeting.unlink(missing_ok=True)
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                save_as_rank(folder, meeting, rank, background, kill if rank == victim else None)
                os._exit(0)
            except BaseException:
                os._exit(3)
        children.append(pid)
    codes = [wait(pid) for pid in children]
    found = found_step(folder)
    remains = sorted(path.name for path in (folder / "checkpoints").iterdir())
    after = Saver(folder / "checkpoints", keep_last=1)
    after.save(record(3), model(3), None)
    assert after.last.error is None and found_step(folder) == 3
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["latest", "step_00000003"], left
    return {"victim": victim, "background": background, "codes": codes, "found": found, "remains": remains}


def wait(pid: int) -> int:
    """The exit code of a child, which must end in time."""
    end = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a rank outlived the killed one")


def main() -> None:
    base = Path(sys.argv[1])
    torch.set_num_threads(1)

    def tell(moment: str, *arguments) -> dict:
        outcome = {"moment": moment, **trial(base, *arguments)}
        print(json.dumps(outcome), flush=True)
        return outcome

    for victim in (0, 1):
        for number in range(1000):
            outcome = tell(f"event {number}", victim, number % 2 == 1, at_event(number))
            if outcome["codes"][victim] == 0:  # the save was over before
                break
        for limit in WRITE_LIMITS:
            tell(f"byte {limit}", victim, False, at_byte(limit))
        tell("staged", victim, True, die)


if __name__ == "__main__":
    main()
