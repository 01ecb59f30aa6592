"""A save that dies leaves the steps before it whole; what is kept is what was asked for."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.checkpoint import list_steps, open_checkpoint, save_checkpoint
from megalith.errors import CheckpointError

# A process that forks a child for each file-system event of a save; the child kills itself at that event. What
# is left is loaded, then saved into again. Audit events are what Python itself reports of opens, renames and
# removals, so every phase of a save is met without knowing how it is written.
KILLED_SAVES = """
import os, signal, shutil, sys
from pathlib import Path

import torch

from conftest import TinyRun
from megalith.checkpoint import list_steps, open_checkpoint

PHASES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
torch.set_num_threads(1)
scenario, folder = sys.argv[1], Path(sys.argv[2])
first, second = TinyRun().train(1), TinyRun().train(2)
if scenario == "same step":
    second.step = 1  # other weights under the same number

def killed_save(event_number):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in PHASES:
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    try:
        sys.addaudithook(hook)
        second.save(folder, keep_last=1)
        os._exit(0)
    except BaseException as error:
        print("the save raised", repr(error), flush=True)
        os._exit(1)

for event_number in range(1000):
    shutil.rmtree(folder, ignore_errors=True)
    first.save(folder)
    code = killed_save(event_number)
    assert code in (0, -signal.SIGKILL), code
    found = TinyRun(seed=9).load(open_checkpoint(folder))
    assert found.equals(first) or found.equals(second), event_number
    if code == 0:
        assert found.equals(second)
        break
    second.save(folder, keep_last=1)
    assert TinyRun(seed=9).load(open_checkpoint(folder)).equals(second), event_number
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["latest", f"step_{second.step:08d}"], left
print(event_number, "kills")
"""


@pytest.mark.parametrize("scenario", ["next step", "same step"])
@pytest.mark.fault(2)
def test_a_save_killed_at_any_moment_leaves_a_whole_step(tmp_path, scenario):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", KILLED_SAVES, scenario, str(tmp_path / "run")],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 15


@pytest.mark.parametrize("limit", [0, 300, 700])
def test_a_full_disk_leaves_the_old_step_whole_and_no_remains(tiny_run, tmp_path, limit):
    run = tiny_run().train(1)
    run.save(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.train(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"step_00000002 could not be saved.*saved before are whole"
        ):
            run.save(tmp_path, keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]
    assert tiny_run(seed=4).load(open_checkpoint(tmp_path)).equals(tiny_run().train(1))
    run.save(tmp_path)
    assert open_checkpoint(tmp_path).manifest.step == 2


def test_an_error_in_writing_the_tokenizer_leaves_no_remains(tiny_run, tmp_path):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        tiny_run().save(tmp_path, write_tokenizer=full)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_record_that_could_not_be_read_again_is_refused_when_it_is_saved(tiny_run, tmp_path):
    run = tiny_run().train(1)
    record = run.record().model_copy(update={"loss_scale": {"scale": float("inf")}})
    with pytest.raises(CheckpointError, match=r"could not be saved.*not JSON compliant"):
        save_checkpoint(tmp_path / "checkpoints", record, run.model, run.optimizer)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tiny_run, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be saved"):
        tiny_run().save(tmp_path)


def test_an_interrupt_leaves_no_remains(tiny_run, tmp_path):
    def interrupt(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run().save(tmp_path, write_tokenizer=interrupt)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (1, None, [6]),
        (2, None, [5, 6]),
        (2, 3, [3, 5, 6]),
        (1, 2, [2, 4, 6]),
    ],
)
def test_the_last_and_every_nth_step_are_kept(tiny_run, tmp_path, keep_last, keep_every, kept):
    run = tiny_run()
    for _ in range(6):
        run.train(1).save(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert list(list_steps(tmp_path / "checkpoints")) == kept


def test_going_on_from_an_early_step_counts_as_newer_than_the_steps_it_leaves_behind(tiny_run, tmp_path):
    run = tiny_run()
    folders = [run.train(1).save(tmp_path) for _ in range(4)]
    back = tiny_run(seed=8).load(open_checkpoint(folders[0])).train(1)
    back.save(tmp_path, keep_last=2)
    assert open_checkpoint(tmp_path).folder == folders[1]  # step 2, saved last
    assert tiny_run(seed=8).load(open_checkpoint(tmp_path)).equals(back)
    assert list(list_steps(tmp_path / "checkpoints")) == [2, 4]


def test_a_step_with_an_unreadable_manifest_takes_no_place_among_the_last(tiny_run, tmp_path):
    run = tiny_run()
    folders = [run.train(1).save(tmp_path) for _ in range(3)]
    (folders[2] / "manifest.json").write_text("{")
    run.train(1).save(tmp_path, keep_last=2)
    assert list(list_steps(tmp_path / "checkpoints")) == [2, 4]


@pytest.fixture
def in_use(tmp_path, monkeypatch):
    """The first file that is removed of step 1 stays, as one does on NFS that another process has open."""
    unlink = os.unlink

    def refuse(name, *arguments, **options):
        if "step_00000001" in os.readlink(f"/proc/self/fd/{options['dir_fd']}") and name == "manifest.json":
            raise OSError(errno.EBUSY, "Device or resource busy", name)
        unlink(name, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    yield
    monkeypatch.undo()


def test_a_step_that_cannot_be_deleted_stops_neither_saving_nor_the_deletion_of_others(
    tiny_run, tmp_path, in_use
):
    run = tiny_run()
    for _ in range(4):
        run.train(1).save(tmp_path, keep_last=1)
    folder = tmp_path / "checkpoints"
    assert list(list_steps(folder)) == [4]
    assert [path.name for path in (folder / "step_00000001.deleted.tmp").iterdir()] == ["manifest.json"]
    again = tiny_run().train(1)
    again.save(tmp_path)  # as after a return to the start
    assert tiny_run(seed=4).load(open_checkpoint(tmp_path)).equals(again)


def test_what_could_not_be_deleted_goes_with_a_later_save(tiny_run, tmp_path):
    (tmp_path / "checkpoints" / "step_00000001.deleted.tmp").mkdir(parents=True)
    tiny_run().train(1).save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]


def test_a_save_reads_no_manifest_that_it_has_read_before(tiny_run, tmp_path, monkeypatch):
    read, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.parent.name) or read_bytes(path))
    run = tiny_run()
    for _ in range(4):
        run.train(1).save(tmp_path, keep_last=3)
    assert read == [f"step_{step:08d}" for step in (1, 2, 3, 4)]


def test_remains_of_other_kinds_are_left_alone(tiny_run, tmp_path):
    run = tiny_run().train(1)
    run.save(tmp_path)
    (tmp_path / "checkpoints" / "notes.tmp").write_text("mine")
    (tmp_path / "checkpoints" / "step_best").mkdir()
    (tmp_path / "checkpoints" / "step_00000009.tmp").mkdir()
    run.train(1).save(tmp_path, keep_last=1)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["latest", "notes.tmp", "step_00000002", "step_best"]
