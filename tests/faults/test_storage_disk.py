"""A disk that refuses: every rank learns it, the old steps stay whole, and training goes on."""

import os
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
from default_cases import by_default
from storage_job import TP2, run_config, save_on_a_bad_disk, save_steps

import megalith
from megalith.checkpoint import list_steps, open_checkpoint
from megalith.checkpoint.open import step_problems
from megalith.errors import CheckpointError, ConfigError
from megalith.launch.lock import OutputLock
from megalith.report.metrics import MetricsWriter, StepMetrics, read_records
from megalith.report.report import write_config

METRICS = [field.name for field in fields(StepMetrics)]


@pytest.fixture
def disk(tmp_path):
    """Mounts file systems: `disk(bytes)` is a folder with so much room."""
    mounted = []

    def disk(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
        )
        if done.returncode:
            pytest.skip("mounting a small tmpfs is not permitted here; EFBIG is tested all the same")
        mounted.append(folder)
        return folder

    yield disk
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def size_of(folder: Path) -> int:
    """Bytes on a tmpfs, which gives pages of 4,096."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def entries(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.parametrize("async_save", by_default([False, True], True), ids=["at once", "in the background"])
def test_training_goes_on_when_the_disk_is_full_and_only_the_last_save_is_an_error(
    pool, disk, tmp_path, async_save
):
    pool.run(save_steps, run_config(tmp_path / "roomy", TP2), 1, size=2)
    full = disk(int(2.5 * size_of(tmp_path / "roomy")))
    config = run_config(full / "run", TP2, async_save=async_save, max_failed_saves=9)
    for step, told, failure in pool.run(save_on_a_bad_disk, config, 4, {}, size=2):
        assert step == 4
        assert [line.startswith("saved") for line in told] == [True, True, False, False, False]
        assert "step_00000003 could not be saved: " in told[2]
        assert "No space left on device" in told[2]
        assert "step_00000004 could not be saved" in failure and "earlier steps are intact" in failure
    assert entries(full / "run") == ["latest", "step_00000001", "step_00000002"]
    assert (full / "run" / "checkpoints" / "latest").read_text() == "step_00000002\n"
    for folder in list_steps(full / "run" / "checkpoints").values():
        assert step_problems(folder) == []


@pytest.mark.parametrize("async_save", by_default([False, True], False), ids=["at once", "in the background"])
@pytest.mark.fault(7)
def test_when_one_rank_cannot_write_all_of_them_learn_which_and_why(pool, tmp_path, async_save):
    pool.run(save_steps, run_config(tmp_path, TP2), 1, size=2)
    config = run_config(tmp_path, TP2, async_save=async_save, load=tmp_path, max_failed_saves=9)
    outcomes = pool.run(save_on_a_bad_disk, config, 2, {1: 1000}, size=2)
    for step, told, failure in outcomes:
        assert step == 3 and len(told) == 3
        assert all("could not be saved: rank 1: File too large" in line for line in told)
        assert told[-1] == f"warning: {failure}"
    assert outcomes[0] == outcomes[1]
    assert entries(tmp_path) == ["latest", "step_00000001"]
    assert step_problems(tmp_path / "checkpoints" / "step_00000001") == []


def test_a_save_after_the_disk_has_room_again_succeeds(disk, tmp_path):
    save_steps(run_config(tmp_path / "roomy"), 1)
    full = disk(int(1.5 * size_of(tmp_path / "roomy")))
    ballast = full / "ballast"
    ballast.write_bytes(bytes(size_of(tmp_path / "roomy")))
    assert save_on_a_bad_disk(run_config(full / "run"), 1, {})[2]
    assert entries(full / "run") == []
    ballast.unlink()
    assert save_on_a_bad_disk(run_config(full / "run"), 1, {})[2] == ""
    assert step_problems(open_checkpoint(full / "run").folder) == []


def test_a_full_disk_does_not_end_a_run_by_its_log_which_is_whole_when_there_is_room_again(disk):
    full = disk(200_000)
    ballast = full / "ballast"
    record = StepMetrics(step=0, **dict.fromkeys(name for name in METRICS if name != "step"))
    with MetricsWriter(full / "run") as writer:
        for step in range(1, 41):
            writer.log_step(replace(record, step=step))
        ballast.write_bytes(bytes(os.statvfs(full).f_bavail * 4096))
        with pytest.warns(UserWarning, match=r"metrics\.jsonl could not be written: No space left on device"):
            for step in range(41, 81):  # into the last page, and beyond it
                writer.log_step(replace(record, step=step))
        assert len(read_records(full / "run" / "metrics.jsonl")) < 80
        ballast.unlink()
        writer.log_step(replace(record, step=81))
    assert [line["step"] for line in read_records(full / "run" / "metrics.jsonl")] == list(range(1, 82))


def test_a_full_disk_at_a_start_or_resume_is_a_refusal_that_no_restart_repeats(disk):
    full = disk(8_000_000)
    config = run_config(full / "run", save_interval=5)
    megalith.train(config)
    ballast = full / "ballast"
    ballast.write_bytes(bytes(os.statvfs(full).f_bavail * 4096))
    config = config.with_settings({"train.train_iters": 14, "checkpoint.load": str(full / "run")})
    for refused in (config, run_config(full / "new")):
        with pytest.raises(
            ConfigError, match=r"cannot be written: No space left on device.*train.output_dir"
        ):
            megalith.train(refused)
    assert not (full / "new").exists() and (full / "run" / "config.yaml").read_text()
    with OutputLock(full / "run"), pytest.raises(ConfigError, match="in use by"):
        OutputLock(full / "run")
    ballast.unlink()
    assert megalith.train(config).step == 14


def test_a_run_that_continues_from_memory_needs_no_room_for_its_settings(disk):
    full = disk(100_000)
    path = full / "config.yaml"
    path.write_text("of its start")
    (full / "ballast").write_bytes(bytes(os.statvfs(full).f_bavail * 4096))
    with pytest.raises(OSError, match="No space left"):
        write_config(path, "new", keeps_old=False)
    with pytest.warns(
        UserWarning, match=r"config\.yaml could not be written: No space left on device; it keeps"
    ):
        write_config(path, "new", keeps_old=True)
    assert path.read_text() == "of its start" and len(list(full.iterdir())) == 2
    path.unlink()
    with pytest.raises(OSError, match="No space left"):
        write_config(path, "new" * 5000, keeps_old=True)


def test_a_run_that_cannot_save_its_end_ends_with_the_exit_code_of_checkpoints(disk):
    full = disk(200_000)  # for the log, not for the state
    with pytest.raises(
        CheckpointError, match=r"step_00000012 could not be saved: No space left.*Free some space"
    ) as error:
        megalith.train(run_config(full / "run", save_interval=5))
    assert error.value.exit_code == 4
    assert entries(full / "run") == []
    records = (full / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(records) == 12  # every step was made
