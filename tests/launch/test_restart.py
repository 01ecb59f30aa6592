"""Which start of a job goes on by itself: one whose own earlier attempt has saved, whatever the clock says."""

import errno
import os

import pytest

from megalith.config import RunConfig
from megalith.errors import ConfigError, TrainingError
from megalith.launch.parent import process_start_time
from megalith.launch.restart import Attempt, locked_output_dir, this_attempt

FIRST, SECOND = Attempt(0, "job host 1"), Attempt(1, "job host 1")


@pytest.fixture
def save(tmp_path):
    """Puts a step there, as saved at `time` in seconds."""

    def save(step: int, time: int) -> None:
        manifest = tmp_path / "checkpoints" / f"step_{step:08d}" / "manifest.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text("{}")
        os.utime(manifest, (time, time))

    return save


def goes_on(output, attempt: Attempt) -> bool:
    """What an attempt is told; it then begins its run."""
    config = RunConfig.from_tree({"train": {"output_dir": str(output)}, "checkpoint": {"load": str(output)}})
    with locked_output_dir(config, attempt) as told:
        (output / "config.yaml").touch()
    return told


def test_a_step_saved_by_a_clock_that_was_set_back_is_found(tmp_path, save):
    assert not goes_on(tmp_path, FIRST)
    assert not goes_on(tmp_path, SECOND)  # nothing was saved
    save(5, time=1000)
    assert goes_on(tmp_path, SECOND)


def test_a_mark_names_its_launcher_so_that_no_other_jobs_is_taken_for_it(tmp_path, monkeypatch, save):
    """In containers the run id, the host's name and the launcher's process id repeat."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ours = this_attempt()
    assert ours == this_attempt() and process_start_time(os.getppid()) is not None
    monkeypatch.setattr("megalith.launch.restart.process_start_time", lambda pid: 17)
    later = this_attempt()
    monkeypatch.setattr("megalith.launch.restart.boot_id", lambda: "another")
    assert len({ours.launcher, later.launcher, this_attempt().launcher}) == 3
    assert not goes_on(tmp_path, ours)
    save(5, time=1000)
    assert goes_on(tmp_path, ours)
    config = RunConfig.from_tree({"train": {"output_dir": str(tmp_path)}})
    with pytest.raises(ConfigError, match="holds another run"), locked_output_dir(config, later):
        pass


def test_an_interrupted_mark_is_the_old_one_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "os.replace", lambda old, new: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ConfigError, match="No space left"):
        goes_on(tmp_path / "run", FIRST)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_read_now_is_not_taken_for_another_runs(tmp_path, monkeypatch, save):
    assert not goes_on(tmp_path, FIRST)
    save(5, time=1000)

    def fail(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with (
        monkeypatch.context() as patch,
        pytest.raises(TrainingError, match=r"\.job, .* Stale file handle; start"),
    ):
        patch.setattr("megalith.launch.restart.read_small_file", fail)
        goes_on(tmp_path, SECOND)
    assert goes_on(tmp_path, SECOND)


def test_steps_from_before_the_job_do_not_count_until_they_are_saved_again(tmp_path, save):
    save(5, time=1000)
    assert not goes_on(tmp_path, FIRST)
    os.utime(tmp_path / ".job", (0, 0))  # so that the step looks younger
    assert not goes_on(tmp_path, SECOND)
    save(5, time=900)
    assert goes_on(tmp_path, SECOND)
