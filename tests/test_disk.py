"""Files and folders on the disk: whole, with their entries synced, and never through somebody's symbolic link."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import megalith
from megalith.checkpoint.store import StepFolder
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.io import atomic_path, make_folder, open_file, replace_file
from megalith.launch.hang_watch import HangWatch
from megalith.launch.lock import OutputLock
from megalith.launch.restart import Attempt, locked_output_dir, record_failures
from megalith.parallel.pipeline.timeline import Timeline, write_timeline
from megalith.report.metrics import MetricsWriter, StepMetrics
from megalith.report.plot import plot_run
from megalith.report.profiler import StepProfiler
from megalith.report.trackers import TensorBoardTracker, _load_or_create_id


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """The folders and files that were synced."""
    paths, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_every_new_folder_is_synced_in_the_one_above_it(tmp_path, synced):
    make_folder(tmp_path / "a" / "b")
    assert sorted(synced) == [tmp_path, tmp_path / "a"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_a_runs_output_folder_and_its_checkpoints_are(tmp_path, synced):
    with OutputLock(tmp_path / "runs" / "one"):
        assert sorted(synced) == [tmp_path, tmp_path / "runs"]
        StepFolder(tmp_path / "runs" / "one" / "checkpoints", 1).begin()
        assert synced[2:] == [tmp_path / "runs" / "one"]


def test_a_folder_that_may_be_written_but_not_opened_gets_one_too(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(f"{folder} may not be opened")

    monkeypatch.setattr("megalith.io.sync_folder", refuse)
    make_folder(tmp_path / "shared" / "mine")
    assert (tmp_path / "shared" / "mine").is_dir()


def lock(output):
    OutputLock(output).release()


def claim(output):
    with locked_output_dir(RunConfig.from_tree({"train": {"output_dir": str(output)}}), Attempt(0, "job")):
        pass


def write_metrics(output):
    with MetricsWriter(output) as writer:
        writer.log_step(StepMetrics(1, *[0.0] * 10))
        writer.log_evaluation(1, 2.0)
        writer.log_experts(1, {0: [1]})
        writer.log_event({"event": "stop"})


def fail(output):
    (output / "config.yaml").touch()
    with suppress(ZeroDivisionError), record_failures(output, Attempt(), 0):
        raise ZeroDivisionError


def trace(output):
    with StepProfiler(output, range(1, 2)) as profiler:
        profiler.before_step(1)


def draw(output):
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    plot_run(output, output / "loss.png")


def hang(output):
    watch = HangWatch(SimpleNamespace(), 0, 1, 1.0, None, output)
    watch._dump()


WRITTEN = {
    ".lock": lock,
    ".job": claim,
    "config.yaml": lambda output: train_one_step(output),
    "metrics.jsonl": write_metrics,
    "evaluations.jsonl": write_metrics,
    "experts.jsonl": write_metrics,
    "events.jsonl": write_metrics,
    "wandb_id": lambda output: _load_or_create_id(output / "wandb_id"),
    "failures": fail,
    "failures/attempt_000_rank_00000.txt": fail,
    "profile": trace,
    "profile/trace.json": trace,
    "profile/top_operations.txt": trace,
    "tensorboard": TensorBoardTracker,
    "pipeline.json": lambda output: write_timeline(output, Timeline([])),
    "loss.png": draw,
    "flight_recorder_rank0.json": hang,
    "checkpoints/latest": lambda output: replace_file(output / "checkpoints" / "latest", "step_1"),
}


FOLDERS = ("failures", "profile", "tensorboard")


def train_one_step(output):
    tree = {
        "model": {
            "preset": "tiny-gpt",
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "vocab_size": 16,
        },
        "data": {"mock": True, "seq_length": 8, "num_workers": 0},
        "optim": {"lr": 0.1},
        "train": {"train_iters": 1, "global_batch_size": 1, "eval_iters": 0, "output_dir": str(output)},
        "runtime": {"device": "cpu"},
    }
    megalith.train(RunConfig.from_tree(tree))


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("target", ["there", "dangling"])
@pytest.mark.filterwarnings("ignore:.*could not be written.*it is a symbolic link")
def test_nothing_in_an_output_folder_is_written_through_a_symbolic_link(tmp_path, name, target):
    output, other = tmp_path / "run", tmp_path / "elsewhere"
    (output / name).parent.mkdir(parents=True)
    if target == "there":
        other.mkdir() if name in FOLDERS else other.write_text("not mine")
    (output / name).symlink_to(other)
    before = {path: path.read_bytes() for path in tmp_path.glob("elsewhere*") if path.is_file()}
    try:
        WRITTEN[name](output)
    except (OSError, ConfigError) as refusal:
        assert "symbolic link" in str(refusal)
    assert (output / name).is_symlink()
    assert {path: path.read_bytes() for path in tmp_path.glob("elsewhere*") if path.is_file()} == before
    assert other.exists() == (target == "there") and not (other.is_dir() and list(other.iterdir()))


def test_a_link_a_pipe_and_a_folder_are_refused_with_their_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, told in (("link", "symbolic link"), ("pipe", ""), ("folder", "")):
        with pytest.raises(OSError, match=f"{told}.*{name}"):
            open_file(tmp_path / name, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(ConfigError, match=r"run cannot be written: it is a symbolic link.*\(.*\.lock\)"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").symlink_to(tmp_path / "file")
        OutputLock(tmp_path / "run")


def test_a_replaced_file_is_the_old_or_the_new_whole_and_synced_before_it_gets_its_name(
    tmp_path, synced, monkeypatch
):
    path = tmp_path / "config.yaml"
    (tmp_path / ".config.yaml.0123456789abcdef.tmp").write_text("of a process that was killed")
    replace_file(path, "old")
    partial, folder = synced
    assert partial.parent == tmp_path and partial.name.startswith(".config.yaml.") and folder == tmp_path
    with pytest.raises(KeyError), atomic_path(path) as begun:
        begun.write_text("new")
        raise KeyError
    monkeypatch.setattr(os, "replace", lambda old, new: pytest.fail("it has its name before it is synced"))
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def refuse(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")
