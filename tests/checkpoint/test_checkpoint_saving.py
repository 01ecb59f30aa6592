"""A save that dies leaves the steps before it whole; what is kept is what was asked for."""

import errno
import os
import resource
from pathlib import Path

import forked
import pytest
import torch
from default_cases import by_default

from megalith.checkpoint import (
    Extent,
    RunRecord,
    list_steps,
    manifest,
    open_checkpoint,
    save_checkpoint,
    steps,
)
from megalith.checkpoint.manifest import TensorRecord
from megalith.checkpoint.store import StepFolder
from megalith.checkpoint.writer import ShardWriter, WriteItem
from megalith.errors import CheckpointError

# A process that forks a child for each file-system event of a save; the child kills itself at that event. What
# is left is loaded, then saved into again. Audit events are what Python itself reports of opens, renames and
# removals, so every phase of a save is met without knowing how it is written.
KILLED_SAVES = """
import os, signal, shutil, sys, warnings
warnings.simplefilter("error", UserWarning)
from pathlib import Path

import torch

from checkpoint.conftest import TinyRun
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


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("scenario", by_default(["next step", "same step"], "next step"))
@pytest.mark.fault(2)
def test_a_save_killed_at_any_moment_leaves_a_whole_step(tmp_path, scenario):
    done = forked.run(["-c", KILLED_SAVES, scenario, tmp_path / "run"])
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
            CheckpointError,
            match=r"step_00000002 could not be saved.*it takes .* GB, .* GB are free.*earlier steps are intact",
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
    with pytest.raises(CheckpointError, match=r"could not be saved.*should be a finite number"):
        save_checkpoint(tmp_path / "checkpoints", record, run.model, run.optimizer)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tiny_run, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be saved"):
        tiny_run().save(tmp_path)


def test_a_folder_named_latest_is_a_sentence_before_anything_is_written(tiny_run, tmp_path):
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="latest is a folder, but must be a file"):
        tiny_run().save(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["latest"]


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
        if name == "manifest.json" and "step_00000001" in os.readlink(f"/proc/self/fd/{options['dir_fd']}"):
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
    read, real = [], manifest.read_small_file

    def counted(path, folder, largest):
        read.append(folder.name)
        return real(path, folder, largest)

    monkeypatch.setattr(manifest, "read_small_file", counted)
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


@pytest.mark.parametrize("refusal", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(("owner", "call"), [(Path, "lstat"), (manifest, "read_small_file")])
def test_a_step_whose_manifest_cannot_be_read_for_a_moment_is_neither_deleted_nor_counted(
    tiny_run, tmp_path, monkeypatch, owner, call, refusal
):
    run = tiny_run()
    for _ in range(3):
        run.train(1).save(tmp_path)
    steps._save_number.cache_clear()
    asked = getattr(owner, call)

    def fails(path, *arguments, **options):
        if path.name == "manifest.json" and path.parent.name == "step_00000003":
            raise OSError(refusal, os.strerror(refusal))
        return asked(path, *arguments, **options)

    monkeypatch.setattr(owner, call, fails)
    newest = run.train(1).save(tmp_path, keep_last=2)
    monkeypatch.undo()
    assert list(list_steps(tmp_path / "checkpoints")) == [2, 3, 4]
    numbers = [steps.save_number(folder) for folder in list_steps(tmp_path / "checkpoints").values()]
    assert numbers == sorted(set(numbers)) and open_checkpoint(tmp_path).folder == newest


@pytest.mark.parametrize("number", ["Infinity", "NaN", "true", '"7"', "1.5", "null"])
def test_a_save_number_that_is_none_makes_a_step_old_and_stops_nothing(tiny_run, tmp_path, number):
    run = tiny_run()
    folder = run.train(1).save(tmp_path)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"save_number": 1,', f'"save_number": {number},'))
    run.train(1).save(tmp_path, keep_last=1)
    assert list(list_steps(tmp_path / "checkpoints")) == [2]


def test_a_commit_syncs_all_that_it_names_before_it_names_it(tiny_run, tmp_path, monkeypatch):
    """The order that a power cut must not turn round: contents, their folder, the name, its folder, the pointer."""
    done, fsync, replace = [], os.fsync, os.replace

    def name_of(descriptor):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", lambda fd: done.append(("sync", name_of(fd).name)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append(("name", Path(b).name)) or replace(a, b))
    tiny_run().save(tmp_path, write_tokenizer=lambda folder: (folder / "t.json").write_text("{}"))
    at = {event: number for number, event in enumerate(done)}  # where each was last
    files = ["model-00000-000.safetensors", "optimizer-00000-000.safetensors", "t.json", "manifest.json"]
    for name in (*files, "tokenizer", "step_00000000.tmp"):
        assert at["sync", name] < at["name", "step_00000000"], done
    assert max(at["sync", name] for name in files) < at["sync", "step_00000000.tmp"]
    assert at["sync", "t.json"] < at["sync", "tokenizer"]
    assert max(at["sync", name] for name in files[:3]) < at["sync", "manifest.json"]
    between = done[at["name", "step_00000000"] : at["name", "latest"]]
    assert ("sync", "checkpoints") in between, done
    assert done[-1] == ("sync", "checkpoints") and at["name", "latest"] < len(done) - 1


@pytest.mark.parametrize("what", ["shorter", "longer", "missing", "a folder"])
def test_a_file_that_is_not_as_long_as_its_writer_says_stops_the_commit(tmp_path, what):
    """As when another machine's files do not come through the filesystem that it was to share."""
    step = StepFolder(tmp_path, 1)
    step.begin()
    with ShardWriter(step.temporary, shard_bytes=100) as shards:
        shards.add(WriteItem("model", "a", torch.arange(3.0), Extent((0,), (3,)), (3,)))
        written = shards.finish()
    (file,) = step.temporary.iterdir()
    content = file.read_bytes()
    if what in ("missing", "a folder"):
        file.unlink()
    if what == "a folder":
        file.mkdir()
    elif what != "missing":
        file.write_bytes(content[:-1] if what == "shorter" else content + b"\0")
    table = {"model": {"a": TensorRecord(dtype="F32", shape=[3])}}
    with pytest.raises(
        CheckpointError,
        match=r"model-00000-000.*was written by another process, but this process",
    ):
        step.commit(RunRecord(step=1, consumed_samples=0, config={}), table, [written], None)
    assert not step.final.exists() and not (tmp_path / "latest").exists()


@pytest.mark.parametrize(
    "name", ["latest", "latest.tmp", ".latest.tmp", "step_00000001.tmp", "step_00000001"]
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_save_writes_through_no_link_that_came_with_the_folder(tiny_run, tmp_path, name, dangling):
    outside = tmp_path / "mine"
    if not dangling:
        if "step" in name:
            outside.mkdir()
            (outside / "manifest.json").write_text("mine")
        else:
            outside.write_text("mine")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / name).symlink_to(outside)
    tiny_run().train(1).save(tmp_path / "run", keep_last=1)
    if dangling:
        assert not outside.exists()
    else:
        assert (outside / "manifest.json" if "step" in name else outside).read_text() == "mine"
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert not latest.is_symlink() and latest.read_text() == "step_00000001\n"
    assert not open_checkpoint(tmp_path / "run").folder.is_symlink()
