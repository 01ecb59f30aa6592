"""`megalith doctor` finds what is wrong with a machine, and says what to do."""

import errno
import itertools
import json
import os
import re
import socket
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.cli.main import main
from megalith.doctor import checks as software
from megalith.doctor import connectivity, devices, disk
from megalith.doctor.checks import EXTRAS, MINIMUM_DRIVERS, SUPPORTED, check_driver
from megalith.doctor.gpus import GpuState
from megalith.errors import ConfigError
from megalith.launch.pool import RankFailed

ROOT = Path(__file__).parents[2]


def states(checks) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_the_doctor_prints_one_object_and_its_exit_code_says_whether_something_is_bad(tmp_path, capsys):
    assert main(["doctor", "--quick", "--json", "--output", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["worst"] in ("good", "warn")
    names = [check["name"] for check in report["checks"]]
    assert {"Python", "torch", "devices", "output disk", "disk: lock", "ports", "[gpu]"} <= set(names)
    assert os.listdir(tmp_path) == []
    with socket.socket() as probe:  # bound, and nobody listens
        probe.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{probe.getsockname()[1]}"
        assert main(["doctor", "--quick", "--output", str(tmp_path), "--reach", there]) == 1
    out = capsys.readouterr().out
    assert (
        f"bad   reach {there}" in out
        and "Connection refused\n" in out
        and "→ start the job's first machine" in out
    )


def test_processes_of_a_machine_without_gpus_are_measured_over_gloo(pool):
    (rates, other) = pool.run(devices.all_reduce_rates, [(0, 1)], size=2)
    assert rates.keys() == other.keys() == {(0, 1)} and rates[0, 1] > 1e6


def test_a_pool_that_fails_is_bad_with_its_last_line(monkeypatch):
    class Broken:
        def __init__(self, *args): ...
        def run(self, *args):
            raise RankFailed("rank 1:\nTraceback\nRuntimeError: no route")

        def close(self): ...

    monkeypatch.setattr(devices, "Pool", Broken)
    check = devices.check_gloo(1.0)
    assert (check.state, check.finding) == ("bad", "RuntimeError: no route") and "firewall" in check.advice


def test_versions_are_judged_by_the_table(monkeypatch):
    monkeypatch.setattr(software.torch, "__version__", "2.10.1+cu128")
    python, torch_check = software.check_software()
    assert python.state == "good" and torch_check.state == "bad"
    assert torch_check.advice == "install torch 2.11 to 2.13"
    with pytest.raises(ConfigError, match=r"torch is 2.10.1\+cu128; install torch"):
        software.check_megatron_bridge_available()
    monkeypatch.setattr(software.torch, "__version__", "2.99.0")
    assert states(software.check_software())["torch"] == "warn"
    software.check_megatron_bridge_available()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, SUPPORTED["Python"][0]))
    assert "torch>=" + ".".join(map(str, SUPPORTED["torch"][0])) in project["dependencies"]


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "do"),
    [
        ("580.65.06", "13.0", "good", ""),
        ("570.86.15", "13.0", "bad", "a driver of 580.65"),
        ("550.54.15", "12.8", "warn", "came with 570.26"),
        ("470.82", "12.8", "bad", "525.60"),
        (None, "12.8", "warn", "nvidia-smi"),
        ("600.1", "14.2", "good", ""),  # newer than the table
    ],
)
def test_the_driver_has_to_serve_torchs_cuda(driver, cuda, state, do):
    check = check_driver(driver, cuda)
    assert check.state == state and do in check.advice
    assert set(MINIMUM_DRIVERS) == {12, 13}


def test_the_line_that_installs_an_extra_names_one_that_there_is(monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"docs", "test"}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megalith").rglob("*.py"))
    assert set(re.findall(r"install_line\('(\w+)'\)", sources)) <= set(extras)
    for extra, (modules, _) in EXTRAS.items():
        named = " ".join(extras[extra]).replace("nvidia-ml-py", "pynvml").replace("-", "_")
        assert all(module in named for module in modules), extra
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in software.check_packages(has_gpu=True)}
    assert checks["[gpu]"].state == "warn" and "[gpu]'" in checks["[gpu]"].advice
    assert checks["[log]"].state == "good" and checks["[log]"].advice.startswith("if wanted: pip install")


def test_little_shared_memory_is_bad_only_where_gpus_share_it(monkeypatch):
    usage = SimpleNamespace(total=64 * 2**20, free=64 * 2**20)  # docker's default
    monkeypatch.setattr(software.shutil, "disk_usage", lambda folder: usage)
    assert (
        software.check_shared_memory(8).state == "bad"
        and "--ipc=host" in software.check_shared_memory(8).advice
    )
    assert software.check_shared_memory(0).state == "warn"


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    (missing,) = disk.check_disk(tmp_path / "missing")
    assert missing.state == "bad" and "No such file" in missing.finding
    real = disk.fcntl.flock

    def no_locks(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", no_locks)
    assert states(disk.check_disk(tmp_path, measured=False))["disk: lock"] == "warn"
    monkeypatch.setattr(disk.fcntl, "flock", lambda descriptor, how: None)
    found = {check.name: check for check in disk.check_disk(tmp_path, measured=False)}
    assert found["disk: lock"].finding == "two holders got the same lock"
    monkeypatch.setattr(disk.fcntl, "flock", real)

    def full(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(disk, "sync_file", full)
    *_, last = disk.check_disk(tmp_path)
    assert (last.state, last.finding) == ("bad", "Disk quota exceeded")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("free", "state", "do"), [(3e9, "warn", "a few checkpoints fill it"), (8e6, "bad", "no checkpoint fits")]
)
def test_a_disk_with_little_room_is_named_and_still_tried(tmp_path, monkeypatch, free, state, do):
    monkeypatch.setattr(disk, "DISK_BYTES", 2**24)
    monkeypatch.setattr(
        software.shutil, "disk_usage", lambda folder: SimpleNamespace(total=10**12, free=free)
    )
    room, *others = disk.check_disk(tmp_path)
    assert room.state == state and do in room.advice and f"{free / 1e9:.1f} GB free" in room.finding
    measured = {"disk: write"} if state == "warn" else set()
    assert {check.name for check in others} == {"disk: lock", "disk: fsync, rename"} | measured


def test_a_folder_that_cannot_be_written_is_one_bad_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (check,) = disk.check_disk(tmp_path / "file")
    assert check.state == "bad" and "Not a directory" in check.finding and "--output" in check.advice

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "make_subfolder", full)
    (check,) = disk.check_disk(tmp_path)
    assert check.state == "bad" and "make room" in check.advice


def test_the_speed_of_the_disk_is_measured_and_a_slow_one_named(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "DISK_BYTES", 2**24)
    check = disk.check_write_speed(tmp_path / "data")
    assert "MB/s" in check.finding and (tmp_path / "data").stat().st_size == 2**24
    monkeypatch.setattr(disk, "SLOW_DISK", float("inf"))
    monkeypatch.setattr(disk, "SLOW_SYNC", 0.0)
    slow = {check.name: check for check in disk.check_disk(tmp_path)}
    assert slow["disk: write"].state == "warn" and "async_save" in slow["disk: write"].advice
    assert slow["disk: fsync, rename"].state == "warn" and "faster disk" in slow["disk: fsync, rename"].advice


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        checks = list(connectivity.check_network({"MASTER_PORT": str(port)}))
    assert f"{port} (MASTER_PORT) in use" in checks[0].finding and checks[0].state == "warn"
    with pytest.raises(ConfigError, match="--reach is 'nowhere', but must be HOST:PORT"):
        connectivity.check_reachable("nowhere")
    with pytest.raises(
        ConfigError, match="--reach is 'node:70000', but must be HOST:PORT with a port from 1 to 65535"
    ):
        connectivity.check_reachable("node:70000")
    wrong, *_ = connectivity.check_network({"MASTER_PORT": "295000"})
    assert (wrong.name, wrong.state, wrong.finding) == ("MASTER_PORT", "bad", "'295000'")


def test_a_pair_of_gpus_that_is_far_slower_than_the_best_is_named():
    rates = {pair: 340e9 for pair in itertools.combinations(range(4), 2)} | {(1, 3): 42e9}
    line, slow = devices.check_pair_rates(rates)
    assert line.state == "good" and "0-1 340" in line.finding
    assert slow.state == "warn" and slow.finding.startswith(
        "GPUs 1 and 3: 42.0 GB/s, the fastest pair has 340"
    )


def test_a_machine_with_four_gpus_is_looked_at(monkeypatch):
    """By what torch and the driver would say there; the measurement itself is made on GPUs."""
    cuda, groups = devices.torch.cuda, []
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "get_device_properties": lambda n: SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid=str(n)),
        "mem_get_info": lambda n: (10e9 if n == 2 else 139e9, 140e9),
        "can_device_access_peer": lambda one, other: {one, other} != {0, 3},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(cuda, name, answer)
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "driver_version", lambda: "580.95.05")
    hot = GpuState("NVIDIA H200", 92, 100, slowed=0x40, clock=345, max_clock=1980)
    well = GpuState("NVIDIA H200", 40, 0, ecc_errors=0)
    monkeypatch.setattr(devices, "read_gpu", lambda uuid: hot if uuid == "GPU-1" else well)
    monkeypatch.setattr(
        devices,
        "read_links",
        lambda own, peers: {
            n: "PCIe" if {own, u} == {"GPU-0", "GPU-3"} else "NVLink" for n, u in peers.items()
        },
    )

    class FakePool:
        def __init__(self, size, timeout, device_type):
            assert (size, device_type) == (4, "cuda")

        def run(self, function, given):
            groups.extend(given)
            return [{group: 300e9 for group in given if rank in group} for rank in range(4)]

        def close(self): ...

    monkeypatch.setattr(devices, "Pool", FakePool)
    checks = {check.name: check for check in devices.check_devices()}
    assert len(groups) == 7 and groups[-1] == (0, 1, 2, 3)
    assert checks["driver"].state == checks["GPU 0"].state == checks["GPU 0: health"].state == "good"
    assert checks["GPU 1: health"].state == "bad" and "cooling" in checks["GPU 1: health"].advice
    assert checks["GPU 2: memory"].state == "warn"
    assert (
        "no NVLink between 0-3" in checks["NVLink"].advice
        and "not between 0-3, 3-0" in checks["peer access"].finding
    )
    assert checks["NCCL"].finding == "2.28.9" and checks["all-reduce over 4"].state == "good"
