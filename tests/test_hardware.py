"""Known devices have their datasheet's peak, unknown ones have none, and a missing GPU is a sentence."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from megalith import hardware
from megalith.errors import ConfigError
from megalith.hardware import DATASHEETS, device_info, local_device_info, pick_device, to_device


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_known_device_has_its_dense_datasheet_peak(name, dtype, tera):
    assert device_info(name).peak(dtype) == pytest.approx(tera * 1e12)


def test_dtype_that_the_device_lacks_has_no_peak():
    assert device_info("Tesla V100-SXM2-16GB").peak("bf16") is None
    assert device_info("NVIDIA A100-SXM4-80GB").peak("fp8") is None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H200 Ultra",
        "NVIDIA A10G",
        "",
    ],
)
def test_unknown_device_never_gets_anothers_peak(name):
    info = device_info(name, memory_bytes=7)
    assert info.peak_flops is None
    assert info.peak("bf16") is None
    assert info.memory_bytes == 7


def test_cpu_has_a_name_and_memory_but_no_peak():
    info = local_device_info("cpu")
    assert info.name.startswith("CPU (")
    assert info.memory_bytes > 0
    assert info.peak("fp32") is None


def test_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    machine, limit = hardware.host_memory_bytes(), tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(limit)))
    for written, memory in (("max\n", machine), ("1000000\n", 10**6), (f"{2**63 - 4096}\n", machine)):
        limit.write_text(written)
        assert hardware.host_memory_bytes() == memory


def test_table_figures_are_consistent_across_dtypes():
    for name, sheet in DATASHEETS.items():
        peaks = sheet.peak_flops()
        assert peaks["fp32"] < peaks["fp16"], name
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], name
        if "fp8" in peaks:
            assert peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.02), name
        if "tf32" in peaks:
            assert peaks["tf32"] == pytest.approx(peaks["fp16"] / 2, rel=0.03), name


def test_gpu_is_identified_by_the_drivers_name(monkeypatch):
    properties = type("Properties", (), {"name": "NVIDIA H200", "total_memory": 150_000_000_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    info = local_device_info("cuda:0")
    assert (info.name, info.memory_bytes) == ("NVIDIA H200", 150_000_000_000)


def _gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_the_cpu_without_a_gpu_and_the_local_ranks_gpu_with(monkeypatch):
    _gpus(monkeypatch, 0)
    assert pick_device("auto") == torch.device("cpu")
    _gpus(monkeypatch, 4)
    assert pick_device("auto", local_rank=3) == torch.device("cuda", 3)
    assert pick_device("cuda", local_rank=1) == torch.device("cuda", 1)
    assert pick_device("cuda:2", local_rank=1) == torch.device("cuda", 2)
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("request_", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_is_refused_with_the_way_out(monkeypatch, request_):
    _gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"finds no CUDA device.*set runtime.device to cpu or auto"):
        pick_device(request_)


def test_gpu_number_beyond_the_last_is_refused_with_the_count(monkeypatch):
    _gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"cuda:5 was requested.*has 2 CUDA devices \(numbers 0 to 1\)"):
        pick_device("cuda:5")
    with pytest.raises(ConfigError, match=r"local rank 2 needs GPU 2.*start at most 2 processes"):
        pick_device("auto", local_rank=2)


@pytest.mark.parametrize("request_", ["gpu", "cuda:", "cuda:x", "tpu:0"])
def test_unknown_device_request_is_refused(monkeypatch, request_):
    _gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        pick_device(request_)


def test_importing_hardware_does_not_import_torch():
    code = "import sys, megalith.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("device", "at", "pinned", "pins"),
    [
        ("cuda:1", "cpu", False, True),
        ("cuda:1", "cpu", True, False),
        ("cuda:1", "cuda", False, False),
        ("cpu", "cpu", False, False),
    ],
    ids=["as it is", "pinned", "on the device", "to the host"],
)
def test_what_goes_to_a_gpu_goes_from_pinned_memory(device, at, pinned, pins):
    tensor = mock.Mock(**{"device.type": at, "is_pinned.return_value": pinned})
    source = tensor.pin_memory.return_value if pins else tensor
    assert to_device(tensor, device) is source.to.return_value
    source.to.assert_called_once_with(device, non_blocking=True)
    assert tensor.pin_memory.called == pins
