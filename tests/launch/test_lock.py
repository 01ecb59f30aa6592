"""Two jobs cannot share an output folder, a dead one holds nothing, and another run is never written over."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from megalith.errors import ConfigError
from megalith.launch.lock import OutputLock, check_output_dir

HOLD = "import sys; from megalith.launch.lock import OutputLock; lock = OutputLock(sys.argv[1]); "
WAIT = "print('held', flush=True); sys.stdin.read()"


def _holder(folder, code=HOLD + WAIT):
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.fault(25)
def test_second_job_is_refused_with_the_name_of_the_holder(tmp_path):
    process = _holder(tmp_path / "run")
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .*, started 20.*another"):
            OutputLock(tmp_path / "run")
    finally:
        process.communicate()
    OutputLock(tmp_path / "run").release()


def test_killed_job_leaves_the_folder_free(tmp_path):
    process = _holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    OutputLock(tmp_path).release()


def test_forked_worker_that_outlives_a_killed_job_does_not_hold_the_folder(tmp_path):
    fork = (
        "import os\n"
        "pid = os.fork()\n"
        "if pid: os.waitpid(pid, 0)\n"
        "else: print('held', flush=True); sys.stdin.read(); os._exit(0)\n"
    )
    process = _holder(tmp_path, HOLD + "\n" + fork)
    with pytest.raises(ConfigError, match="in use by process"):
        OutputLock(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    OutputLock(tmp_path).release()  # the worker still waits on its open standard input
    process.communicate()


def test_lock_is_exclusive_within_a_process_and_free_after_release(tmp_path):
    with OutputLock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        OutputLock(tmp_path)
    with OutputLock(tmp_path) as lock:
        lock.release()
        OutputLock(tmp_path).release()


def test_left_over_lock_file_of_any_content_locks_nothing(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff not json")
    OutputLock(tmp_path).release()


def test_folders_made_for_the_lock_go_with_it_unless_something_was_written(tmp_path):
    with OutputLock(tmp_path / "runs" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    with OutputLock(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "config.yaml").touch()
    assert (tmp_path / "runs" / "one" / ".lock").exists()
    (tmp_path / "mine").mkdir()
    OutputLock(tmp_path / "mine").release()
    assert (tmp_path / "mine").exists()


def test_lock_of_a_folder_that_its_holder_removed_in_between_is_taken_in_a_new_one(tmp_path, monkeypatch):
    holder, real_open = OutputLock(tmp_path / "run"), os.open

    def release_after_open(*arguments):
        descriptor = real_open(*arguments)
        holder.release()
        return descriptor

    monkeypatch.setattr("megalith.launch.lock.os.open", release_after_open)
    with OutputLock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").exists()


def test_filesystem_without_locks_is_warned_of_and_used(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("megalith.launch.lock.fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="has no file locks .*start only one"):
        OutputLock(tmp_path).release()


def test_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: Not a directory; choose a writable folder"):
        OutputLock(tmp_path / "file" / "run")


def _earlier_run(folder):
    (folder / "checkpoints" / "step_00000100").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_folder_with_another_run_is_refused_with_both_ways_out_and_left_as_it_is(tmp_path):
    folder = _earlier_run(tmp_path / "run")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as refusal:
        check_output_dir(folder, load=None)
    message = str(refusal.value)
    assert "holds another run (metrics.jsonl; 1 checkpoint, the last step_00000100)" in message
    assert f"set checkpoint.load to {folder}" in message
    assert "train.output_dir to another folder" in message
    assert sorted(folder.rglob("*")) == before


def test_folder_with_another_run_is_refused_when_load_names_a_third(tmp_path):
    folder = _earlier_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another run"):
        check_output_dir(folder, load=tmp_path / "elsewhere")


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_00000100"])
def test_run_may_go_on_in_its_own_folder(tmp_path, inside):
    folder = _earlier_run(tmp_path / "run")
    check_output_dir(folder, load=folder / inside)


def test_new_empty_or_unrelated_folder_is_accepted(tmp_path):
    check_output_dir(tmp_path / "new", load=None)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").touch()
    check_output_dir(tmp_path, load=None)


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="which is a file"):
        check_output_dir(tmp_path / "file", load=None)
