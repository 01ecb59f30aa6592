"""Which start of a job goes on by itself: one whose own earlier attempt has saved, whatever the clock says."""

import os

import pytest

from megalith.config import RunConfig
from megalith.runtime.restart import Attempt, claimed

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
    with claimed(config, attempt) as told:
        (output / "config.yaml").touch()
    return told


def test_a_step_saved_by_a_clock_that_was_set_back_is_found(tmp_path, save):
    assert not goes_on(tmp_path, FIRST)
    assert not goes_on(tmp_path, SECOND)  # nothing was saved
    save(5, time=1000)
    assert goes_on(tmp_path, SECOND)


def test_steps_from_before_the_job_do_not_count_until_they_are_saved_again(tmp_path, save):
    save(5, time=1000)
    assert not goes_on(tmp_path, FIRST)
    os.utime(tmp_path / ".job", (0, 0))  # so that the step looks younger
    assert not goes_on(tmp_path, SECOND)
    save(5, time=900)
    assert goes_on(tmp_path, SECOND)
