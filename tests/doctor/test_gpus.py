"""What the driver tells of a GPU becomes figures of the log, and a GPU that is slowed or fails is named once."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalith import RunConfig, train
from megalith.comm.collectives import Axis
from megalith.doctor import gpus
from megalith.doctor.gpus import GpuMonitor, GpuState, gpu_metrics, read_gpu
from megalith.report import report


class NVMLError(Exception):
    pass


def refused(*arguments):
    raise NVMLError("Not Supported")


def nvml(**changes):
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=100),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=80161 * 2**20, total=143771 * 2**20),
        "nvmlDeviceGetPowerUsage": 612_400,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 60,
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x04,  # the power cap: how a busy GPU runs
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    } | changes
    functions = {
        name: value if callable(value) else (lambda *given, value=value: value)
        for name, value in answers.items()
    }
    constants = (
        "NVML_TEMPERATURE_GPU",
        "NVML_CLOCK_SM",
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "NVML_VOLATILE_ECC",
    )
    return SimpleNamespace(NVMLError=NVMLError, **functions, **dict.fromkeys(constants, 0))


def test_a_healthy_gpu_is_one_line_and_no_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    gpu = read_gpu("GPU-a")
    assert str(gpu) == "NVIDIA H200 | 60 °C, 100 % | 80161 / 143771 MB | 612 / 700 W | 1755 / 1980 MHz"
    assert gpu.faults() == []


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch):
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        nvml(
            nvmlDeviceGetTotalEccErrors=refused,
            nvmlDeviceGetRemappedRows=refused,
            nvmlDeviceGetPowerUsage=refused,
            nvmlDeviceGetCurrentClocksEventReasons=refused,
            nvmlDeviceGetCurrentClocksThrottleReasons=0x40,  # the older name
        ),
    )
    gpu = read_gpu("GPU-a")
    assert (gpu.ecc_errors, gpu.power, gpu.slowed) == (None, None, 0x40)
    assert "gpu_ecc_errors" not in gpu_metrics([gpu]) and gpu_metrics([gpu])["gpu_clock_mhz"] == 1755


def test_without_the_package_or_an_answer_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetHandleByUUID=refused))
    assert read_gpu("GPU-a") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu("GPU-a") is None


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (dict(slowed=0x40, temperature=91, clock=345, max_clock=1980), "by hardware because of heat, at 91 °C and 345"),
        (dict(ecc_errors=3), "3 memory errors that ECC could not correct: reset the GPU, and replace"),
        (dict(rows_failed=True, rows_pending=True), "could not be replaced: replace the GPU"),
        (dict(rows_pending=True), "waits to be replaced: reset the GPU"),
        (dict(alloc_retries=3), "retried 3 times while all kernels waited: recompute"),
    ],
)  # fmt: skip
def test_a_fault_says_what_to_do(state, text):
    (fault,) = GpuState("NVIDIA H200", **state).faults()
    assert text in fault


def test_the_log_shows_the_worst_gpu():
    cool, hot = (
        GpuState("x", 50, 99, clock=1980, ecc_errors=0),
        GpuState("x", 90, 12, clock=700, ecc_errors=2),
    )
    assert gpu_metrics([cool, hot]) == {
        "gpu_temperature": 90, "gpu_utilization": 12, "gpu_clock_mhz": 700, "gpu_ecc_errors": 2,
    }  # fmt: skip


def test_allocation_retries_are_reported_except_in_the_first_step(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_uuid", lambda device: "GPU-a")
    monkeypatch.setattr(gpus, "read_gpu", lambda uuid: GpuState("NVIDIA H200"))
    counted = iter([7, 7, 9, 12])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(counted)})
    events = []
    watch = GpuMonitor(
        torch.device("cuda", 0), Axis(), lambda text, **figures: events.append((figures, text))
    )
    watch.begin()
    assert [watch.read(step)["gpu_alloc_retries"] for step in (10, 20, 30)] == [0, 2, 3]
    [(figures, text)] = [each for each in events if each[0]["event"] == "gpu"]
    assert figures["step"] == 20 and "its memory is full or fragmented" in text


def test_a_fault_is_reported_when_it_begins_and_when_it_returns(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_uuid", lambda device: "GPU-a")
    heat = iter([60, 60, 91, 93, 60, 91])  # the first is asked for at the start
    monkeypatch.setattr(
        gpus,
        "read_gpu",
        lambda uuid: GpuState("NVIDIA H200", (t := next(heat)), slowed=0x40 * (t > 90)),
    )
    events = []
    watch = GpuMonitor(
        torch.device("cuda", 0), Axis(), lambda text, **figures: events.append((figures, text))
    )
    figures = [watch.read(step) for step in (10, 20, 30, 40, 50)]
    assert [each["gpu_temperature"] for each in figures] == [60, 91, 93, 60, 91]
    assert [figures["step"] for figures, _ in events if figures["event"] == "gpu"] == [20, 50]
    assert events[1][1].startswith("warning: the GPU of rank 0 on ") and "look at its cooling" in events[1][1]


def test_a_cpu_needs_no_driver():
    watch = GpuMonitor(torch.device("cpu"), Axis(), print)
    assert not watch.enabled and watch.read(10) == {}


def test_a_run_logs_its_gpu_and_names_one_that_is_slowed(tmp_path, monkeypatch, capsys):
    """On a CPU, with a driver that answers for its GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetCurrentClocksEventReasons=0x40))
    monkeypatch.setattr(gpus, "gpu_uuid", lambda device: "GPU-a")
    monkeypatch.setattr(
        report, "GpuMonitor", lambda device, world, tell: GpuMonitor(torch.device("cuda", 0), world, tell)
    )
    sizes = dict(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=64, max_position_embeddings=16
    )
    output, tensorboard = tmp_path / "run", tmp_path / "tensorboard"
    tree = {
        "model": sizes,
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 4, "global_batch_size": 1, "eval_iters": 0, "output_dir": str(output)},
        "log": {"log_interval": 2, "tensorboard": True, "tensorboard_dir": str(tensorboard)},
    }
    train(RunConfig.from_tree(tree))
    steps = {row["step"]: row for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())}
    figures = dict(
        gpu_temperature=60, gpu_utilization=100, gpu_power_w=612.4, gpu_clock_mhz=1755, gpu_ecc_errors=0
    )
    assert steps[2] | figures == steps[2] and steps[4] | figures == steps[4] and "gpu_power_w" not in steps[3]
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    (named,) = [event for event in events if event["event"] == "gpu"]
    assert (named["step"], named["rank"], "by hardware because of heat" in named["text"]) == (2, 0, True)
    assert named["text"] in " ".join(capsys.readouterr().out.split())
    board = EventAccumulator(str(tensorboard)).Reload()
    assert len(board.Scalars(next(tag for tag in board.Tags()["scalars"] if "gpu_temperature" in tag))) == 2
