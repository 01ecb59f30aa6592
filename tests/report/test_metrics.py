"""metrics.jsonl has the documented keys and nothing but valid JSON, and no step twice after a resume."""

import errno
import json
import math
import os
import signal
import sys
import types
from pathlib import Path

import forked
import pytest

from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.report.line_writer import LineWriter
from megalith.report.metrics import (
    ExpertStepMetrics,
    MetricsWriter,
    StepMetrics,
    last_step,
    perplexity,
    read_records,
    truncate_after_step,
)
from megalith.report.trackers import MegatronNames, TensorBoardTracker, WandbTracker, open_trackers

KEYS = [
    *("step", "loss", "grad_norm", "lr", "global_batch_size", "consumed_samples", "step_time_ms"),
    *("tokens_per_second_per_device", "tflops_per_device", "mfu", "max_memory_gb"),
    *("skipped", "nan_iterations", "loss_scale"),
]


def _step(step, **changes):
    fields = dict(
        step=step,
        loss=4.0 - step / 100,
        grad_norm=1.5,
        lr=3e-4,
        global_batch_size=8,
        consumed_samples=8 * step,
        step_time_ms=12.5,
        tokens_per_second_per_device=1000.0,
        tflops_per_device=0.5,
        mfu=None,
        max_memory_gb=None,
    )
    return StepMetrics(**{**fields, **changes})


def _no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def _lines(folder, name="metrics.jsonl"):
    return [
        json.loads(line, parse_constant=_no_constant) for line in (folder / name).read_text().splitlines()
    ]


def test_line_has_exactly_the_documented_keys_with_null_for_the_unknown(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log_step(_step(1))
    (line,) = _lines(tmp_path)
    assert list(line) == KEYS
    assert line["mfu"] is None and line["loss_scale"] is None
    assert line["loss"] == 3.99 and line["consumed_samples"] == 8


def test_lost_loss_is_null_and_counted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log_step(_step(1, loss=math.nan, grad_norm=math.inf, skipped=1, nan_iterations=1))
        writer.log_evaluation(1, math.nan)
    (line,) = _lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["skipped"], line["nan_iterations"]) == (None, None, 1, 1)
    assert _lines(tmp_path, "evaluations.jsonl") == [
        {"step": 1, "validation_loss": None, "validation_perplexity": None}
    ]


def test_evaluations_stand_in_their_own_file(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log_step(_step(1))
        writer.log_evaluation(1, 2.0)
    assert [list(line) for line in _lines(tmp_path)] == [KEYS]
    (line,) = _lines(tmp_path, "evaluations.jsonl")
    assert line == {"step": 1, "validation_loss": 2.0, "validation_perplexity": math.exp(2.0)}


def test_perplexity_is_capped_as_megatrons_is():
    assert perplexity(3.0) == math.exp(3.0)
    assert math.isnan(perplexity(math.nan))
    assert perplexity(100.0) == perplexity(math.inf) == math.exp(20)


def test_resume_cuts_the_crashed_tail_so_that_no_step_stands_twice(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 8):
            writer.log_step(_step(step))
        writer.log_evaluation(4, 2.0)
        writer.log_evaluation(6, 1.9)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # the crash tore this line
    with MetricsWriter(tmp_path, start_step=5) as writer:
        writer.log_step(_step(6, loss=1.0))
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert _lines(tmp_path)[-1]["loss"] == 1.0
    assert [line["step"] for line in _lines(tmp_path, "evaluations.jsonl")] == [4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluations.jsonl", "metrics.jsonl"]


def test_start_from_nothing_empties_the_files_of_a_run_that_saved_no_checkpoint(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log_step(_step(1))
    MetricsWriter(tmp_path, start_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_file_without_a_tail_is_left_untouched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    inode = path.stat().st_ino
    truncate_after_step(path, 2)
    assert path.stat().st_ino == inode


def test_a_cut_takes_no_room_on_the_disk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    inode = path.stat().st_ino
    truncate_after_step(path, 1)
    assert path.read_text() == '{"step": 1}\n' and path.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [path]


def test_a_last_line_that_lacks_only_its_newline_is_kept_and_the_next_one_stands_by_itself(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log_step(_step(1))
        writer.log_step(_step(2))
        writer.log_event({"event": "stop"})
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text((tmp_path / name).read_text().removesuffix("\n"))
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.log_step(_step(3))
        writer.log_event({"event": "stop"})
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3]
    assert [line["event"] for line in _lines(tmp_path, "events.jsonl")] == ["stop", "stop"]


@pytest.mark.processes
def test_killed_process_loses_no_line(tmp_path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from test_metrics import _step, MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1]); writer.log_step(_step(1)); writer.log_step(_step(2))\n"
        "os.kill(os.getpid(), 9)"
    )
    assert forked.run(["-c", code, tmp_path, Path(__file__).parent]).returncode == -signal.SIGKILL
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]


def test_a_handle_that_a_network_disk_has_made_stale_is_opened_again(tmp_path, monkeypatch):
    def stale(descriptor, content):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    file = LineWriter(tmp_path / "lines")
    file.write("1")
    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match="lines could not be written: Stale file"),
    ):
        patch.setattr("os.write", stale)
        file.write("2")
    file.write("3")
    file.close()
    assert (tmp_path / "lines").read_text() == "1\n2\n3\n"


def test_a_disk_that_refuses_until_the_file_is_closed_costs_its_last_lines_with_a_warning(
    tmp_path, monkeypatch
):
    def over_quota(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = LineWriter(tmp_path / "lines")
    monkeypatch.setattr("os.write", over_quota)
    with pytest.warns(UserWarning, match="its lines are buffered until it can"):
        file.write("1")
    real = os.close
    monkeypatch.setattr("os.close", lambda descriptor: (real(descriptor), over_quota()))
    with pytest.warns(UserWarning, match="lost"):
        file.close()


def test_reading_skips_a_torn_last_line_and_names_any_other_bad_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [record["step"] for record in read_records(path)] == [1, 2]
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        read_records(path)


def test_a_tracker_that_fails_gets_no_more_and_the_others_and_the_run_go_on(tmp_path):
    class Failing:
        def write(self, step, figures):
            raise OSError(28, "No space left on device")

        def close(self):
            raise AssertionError("it was dropped")

    tracker = RecordingSink()
    with MetricsWriter(tmp_path, trackers=[Failing(), tracker]) as writer:
        with pytest.warns(UserWarning, match="Failing failed with OSError: .*No space.*, and is disabled"):
            writer.log_step(_step(1))
        writer.log_step(_step(2))
    assert [step for step, _ in tracker.written] == [1, 2] and len(_lines(tmp_path)) == 2


class RecordingSink:
    def __init__(self):
        self.written, self.closed = [], False

    def write(self, step, figures):
        self.written.append((step, dict(figures)))

    def rewind(self, step):
        self.written.append(("rewind", step))

    def close(self):
        self.closed = True


def test_trackers_get_the_known_finite_figures_under_grouped_names(tmp_path):
    tracker = RecordingSink()
    with MetricsWriter(tmp_path, trackers=[tracker]) as writer:
        writer.log_step(_step(3, loss=math.nan, nan_iterations=1))
        writer.log_evaluation(3, 2.0)
    (_, train), (step, validation) = tracker.written
    assert "train/loss" not in train and "train/mfu" not in train and "train/step" not in train
    assert train["train/grad_norm"] == 1.5 and train["train/nan_iterations"] == 1
    assert step == 3 and validation == {"validation/loss": 2.0, "validation/perplexity": math.exp(2.0)}
    assert tracker.closed


@pytest.fixture(autouse=True)
def files_from_zero(monkeypatch):
    """TensorBoard reads a run's files by their names, which end in a count of the process: the tenth of a second would
    come before the ninth. A run's own are of one process each, or seconds apart."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def test_tensorboard_holds_the_resumed_curve_once(tmp_path):
    with MetricsWriter(tmp_path, trackers=[TensorBoardTracker(tmp_path)]) as writer:
        for step in range(1, 6):
            writer.log_step(_step(step))
    with MetricsWriter(
        tmp_path, start_step=3, trackers=[TensorBoardTracker(tmp_path, start_step=3)]
    ) as writer:
        writer.log_step(_step(4, loss=1.0))
        writer.log_evaluation(4, 2.0)

    assert tensorboard(tmp_path, "train/loss") == {1: 3.99, 2: 3.98, 3: 3.97, 4: 1.0}
    assert tensorboard(tmp_path, "validation/loss") == {4: 2.0}


def tensorboard(folder, name) -> dict[int, float]:
    """What TensorBoard shows of a run, by step; no step is given twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = events.Scalars(name)
    assert len({event.step for event in shown}) == len(shown), [event.step for event in shown]
    return {event.step: round(event.value, 5) for event in shown}


def test_trackers_have_megatrons_tags_where_its_names_are_chosen(tmp_path, calls):
    log = dict(tensorboard=True, wandb=True, tracker_names="megatron")
    model = dict(num_experts=4, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1)
    config = RunConfig.from_tree({"model": model, "log": log, "train": {"output_dir": str(tmp_path)}})
    step = ExpertStepMetrics(**vars(_step(2, loss_scale=None)), moe_aux_loss=1.25, moe_z_loss=0.5)
    with MetricsWriter(tmp_path, trackers=open_trackers(config, 0, 0)) as writer:
        writer.log_step(step, {"mtp_1_loss": 4.5})
        writer.log_timers(2, {"optimizer": 20.0})
        writer.log_evaluation(2, 2.0)
    loss, samples = step.loss, step.consumed_samples
    for name, position, value in (
        ("lm loss", 2, loss), ("lm loss vs samples", samples, loss), ("learning-rate", 2, step.lr),
        ("batch-size vs samples", samples, step.global_batch_size), ("loss-scale", 2, 1.0),
        ("grad-norm", 2, step.grad_norm), ("seq_load_balancing_loss", 2, 1.25), ("z_loss", 2, 0.5),
        ("mtp_1 loss", 2, 4.5), ("iteration-time", 2, step.step_time_ms / 1e3), ("optimizer-time", 2, 0.02),
        ("lm loss validation", 2, 2.0), ("lm loss validation ppl vs samples", samples, math.exp(2.0)),
    ):  # fmt: skip
        assert tensorboard(tmp_path, name) == {position: pytest.approx(value, abs=1e-5)}, name
    sent = next(args[0] for name, args, _ in calls if name == "log")
    assert (sent["lm loss"], sent["samples vs steps"]) == (loss, samples) and "lm loss vs samples" not in sent


def test_megatrons_tags_keep_the_curve_by_samples_of_a_resumed_run(tmp_path):
    for start, steps in ((0, (1, 2)), (2, (3,))):
        tracker = TensorBoardTracker(tmp_path, start, names=MegatronNames().scalars)
        with MetricsWriter(tmp_path, start, [tracker]) as writer:
            for step in steps:
                writer.log_step(_step(step))
    assert len(tensorboard(tmp_path, "lm loss vs samples")) == len(tensorboard(tmp_path, "lm loss")) == 3


def spiked(folder, *trackers):
    """Writes a run that goes back from step 5 to step 2, where it has been evaluated, and on to step 6."""
    with MetricsWriter(folder, trackers=trackers) as writer:
        for step in (1, 2, 3, 4, 5):
            writer.log_step(_step(step))
            writer.log_evaluation(step, 2.0)
        writer.rewind(2)
        for step in (3, 4, 5, 6):
            writer.log_step(_step(step, loss=1.0))
            writer.log_evaluation(step, 1.0)


def test_tensorboard_holds_no_step_twice_after_a_loss_spike(tmp_path):
    spiked(tmp_path, TensorBoardTracker(tmp_path))
    assert tensorboard(tmp_path, "train/loss") == {1: 3.99, 2: 3.98, **dict.fromkeys((3, 4, 5, 6), 1.0)}
    assert tensorboard(tmp_path, "validation/loss") == {1: 2.0, 2: 2.0, **dict.fromkeys((3, 4, 5, 6), 1.0)}


def test_wandb_is_sent_no_step_twice_after_a_loss_spike_or_a_crash(tmp_path, monkeypatch):
    sent = []
    run = types.SimpleNamespace(log=sent.append, finish=lambda: None, define_metric=lambda *a, **k: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kwargs: run))
    spiked(tmp_path, WandbTracker(tmp_path, "project", None, {}))
    for figure in ("train/loss", "validation/loss"):
        assert [record["step"] for record in sent if figure in record] == [1, 2, 3, 4, 5, 6]
    logged = last_step(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path, 4, [WandbTracker(tmp_path, "project", None, {}, logged)]) as writer:
        for step in (5, 6, 7):  # the process ended after step 6 and its last checkpoint was of step 4
            writer.log_step(_step(step))
    assert [record["step"] for record in sent if "train/loss" in record] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("module", "setting", "make"),
    [
        ("torch.utils.tensorboard", "log.tensorboard", lambda folder: TensorBoardTracker(folder)),
        ("wandb", "log.wandb", lambda folder: WandbTracker(folder, "project", None, {})),
    ],
)
def test_missing_tracker_is_a_sentence_with_the_pip_command(tmp_path, monkeypatch, module, setting, make):
    monkeypatch.setitem(sys.modules, module, None)  # what an uninstalled package looks like to an import
    with pytest.raises(
        ConfigError, match=rf"{setting} needs .*pip install .*\[log\]', or leave {setting} out"
    ):
        make(tmp_path)


def test_a_tracker_whose_service_fails_at_the_start_or_in_a_rewind_is_disabled_with_a_warning(
    tmp_path, monkeypatch
):
    def init(**_):
        raise RuntimeError("api.wandb.ai cannot be reached")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = RunConfig.from_tree({"log": {"wandb": True}, "train": {"output_dir": str(tmp_path)}})
    with pytest.warns(
        UserWarning, match=r"WandbTracker is disabled.* api.wandb.ai cannot be reached\); metrics.jsonl"
    ):
        assert open_trackers(config, 0, 0) == []

    class Failing:
        def write(self, step, metrics): ...

        def close(self): ...

        def rewind(self, step):
            raise RuntimeError("the disk is full")

    with MetricsWriter(tmp_path, 0, [Failing()]) as writer:
        writer.log_step(_step(1))
        with pytest.warns(
            UserWarning, match="Failing failed with RuntimeError: the disk is full, and is disabled"
        ):
            writer.rewind(0)
        writer.log_step(_step(1))
    assert last_step(tmp_path / "metrics.jsonl") == 1


@pytest.fixture
def calls(monkeypatch):
    """What a stand-in for W&B was asked for."""
    calls = []

    class Run:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    def init(**kwargs):
        calls.append(("init", (), kwargs))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


def test_an_empty_or_torn_wandb_id_gets_a_new_one_that_stays(tmp_path, calls):
    for left in ("", "\n", "\0\0\0", "../x"):
        (tmp_path / "wandb_id").write_text(left)
        for _ in range(2):
            WandbTracker(tmp_path, "project", None, {})
        first, second = [kwargs["id"] for name, _, kwargs in calls if name == "init"][-2:]
        assert first == second and first.isalnum()
        assert (tmp_path / "wandb_id").read_text() == first + "\n"


def test_resumed_job_goes_on_with_its_wandb_run(tmp_path, calls):
    for _ in range(2):
        tracker = WandbTracker(tmp_path / "my-run", "project", None, {"model": {"num_layers": 2}})
        tracker.write(7, {"train/loss": 1.0})
        tracker.close()
    first, second = [kwargs for name, _, kwargs in calls if name == "init"]
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["name"], first["project"], first["config"]) == (
        "my-run",
        "project",
        {"model": {"num_layers": 2}},
    )
    assert ("log", ({"step": 7, "train/loss": 1.0},), {}) in calls
    assert ("define_metric", ("*",), {"step_metric": "step"}) in calls
    assert calls[-1][0] == "finish"


def test_trackers_write_where_the_settings_say(tmp_path, calls):
    log = dict(tensorboard=True, tensorboard_dir=f"{tmp_path}/tb", wandb=True, wandb_entity="team")
    log |= dict(wandb_dir=f"{tmp_path}/wb")
    config = RunConfig.from_tree({"train": {"output_dir": str(tmp_path / "run")}, "log": log})
    for tracker in open_trackers(config, 0, 0):
        tracker.write(1, {"train/loss": 1.0})
        tracker.close()
    assert list((tmp_path / "tb").glob("events*")) and not (tmp_path / "run" / "tensorboard").exists()
    given = calls[0][2]
    assert (given["entity"], given["dir"]) == ("team", f"{tmp_path}/wb") and (tmp_path / "wb").is_dir()
