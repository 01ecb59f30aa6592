"""Faults of a host: its memory runs out, /dev/shm is full, its clock jumps, two jobs begin in one folder at once."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Forked
from in_process_job import MEMORY_LIMIT
from in_process_trials import happened, left_by, restarts, run
from ranks import steps, words
from test_phases import GRPO_MODEL, STEPS, finish, grpo, start, state_of, training, undisturbed  # noqa: F401

pytestmark = pytest.mark.full
LIMIT = 64 * 2**20  # bytes of memory after which the kernel kills the rank


@pytest.fixture
def memory_cgroup(monkeypatch):
    """Create a memory cgroup with a limit, of either version."""
    name = f"megalith-test-{os.getpid()}"
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        group, limits = Path("/sys/fs/cgroup", name), ("memory.max", "memory.swap.max")
    else:
        group, limits = Path("/sys/fs/cgroup/memory", name), ("memory.limit_in_bytes",)
    try:
        group.mkdir()
        for limit in limits:
            if (group / limit).exists():
                (group / limit).write_text(str(LIMIT if limit != "memory.swap.max" else 0))
        if not (group / limits[0]).exists():
            raise OSError("the memory controller is not enabled for this group")
    except OSError as error:
        shutil.rmtree(group, ignore_errors=True)
        pytest.skip(f"a memory cgroup cannot be created here: {error}")
    monkeypatch.setenv(MEMORY_LIMIT, str(group))
    yield group
    group.rmdir()


OOM_STEPS = 13


@pytest.mark.parametrize("interval", [2, None], ids=["in process", "all processes"])
def test_a_rank_that_the_kernel_kills_for_memory_is_replaced(tmp_path, memory_cgroup, interval):
    settings = {"checkpoint__memory_interval": interval}
    run(tmp_path / "straight", "sharded", OOM_STEPS, [], **settings)
    text = run(tmp_path / "run", "sharded", OOM_STEPS, [(2, "step", 7, "oom")], **settings)
    assert left_by(tmp_path / "run", OOM_STEPS) == left_by(tmp_path / "straight", OOM_STEPS), text
    assert "rank 2 was ended by SIGKILL, which the kernel sends when host memory runs out" in text
    assert happened(tmp_path / "run") == 1 and restarts(text) == ((1, 0) if interval else (0, 1))


# Runs a command in a mount namespace of its own, in which /dev/shm has no room.
FULL_SHM = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, REC, PRIVATE = 0x20000, 0x4000, 1 << 18
if libc.unshare(NEWNS) or libc.mount(None, b"/", None, REC | PRIVATE, None):
    sys.exit(77)
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4096"):
    sys.exit(77)
with open("/dev/shm/ballast", "wb") as file:
    file.write(bytes(4096))
import runpy
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAIN = Path(__file__).with_name("in_process_job.py")


@pytest.mark.parametrize("command", [training, grpo], ids=["train", "grpo"])
def test_a_full_dev_shm_changes_nothing(tmp_path, undisturbed, command):  # noqa: F811
    output = tmp_path / "run"
    arguments = [*command(output), "--data.num_workers", "2", "--nproc", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_FAILURES": "[]"}
    running = Forked(["-c", FULL_SHM, MAIN, *arguments], tmp_path / "log", env=environment)
    code = finish(running)
    if code == 77:
        pytest.skip("mount namespaces are not permitted here")
    assert code == 0, (tmp_path / "log").read_text()
    assert state_of(output) == undisturbed(command)


def test_preprocess_names_a_full_dev_shm_and_needs_none_without_workers(tmp_path):
    lines = [json.dumps({"text": f"document {n} " * 20}) for n in range(400)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    texts, codes = {}, {}
    for workers in ("2", "0"):
        words = ["preprocess", "--input", tmp_path / "corpus.jsonl", "--output-prefix", tmp_path / workers]
        words += ["--tokenizer-type", "ByteTokenizer", "--workers", workers]
        environment = {**os.environ, "TEST_FAILURES": "[]"}
        running = Forked(["-c", FULL_SHM, MAIN, *words], tmp_path / f"{workers}.log", env=environment)
        codes[workers], texts[workers] = finish(running), (tmp_path / f"{workers}.log").read_text()
    if 77 in codes.values():
        pytest.skip("mount namespaces are not permitted here")
    assert codes == {"2": 3, "0": 0}, texts
    assert "they need space in /dev/shm; free some, or set 0 workers" in " ".join(texts["2"].split())
    assert "Traceback" not in texts["2"]


# Adds the seconds in a mapped file to the wall clock. The monotonic clock stays as it is, as when NTP sets a clock.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset(void) {
    static volatile long *at;
    if (!at) {
        int file = open(getenv("TEST_CLOCK"), O_RDONLY);
        at = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    }
    return at;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += *offset();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
DAY = 86400
CLOCK_STEPS = 60


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_jumps_a_day_forward_and_a_month_back_changes_nothing(tmp_path):
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    offset.write_bytes(bytes(8))
    settings = {"checkpoint__save_interval": 5, "checkpoint__async_save": True, "checkpoint__keep_last": 3}
    settings |= {"runtime__distributed_timeout_minutes": 1, "train__exit_duration_in_mins": 600}
    outputs = tmp_path / "straight", tmp_path / "jumps"
    for output in outputs:
        command = [
            *words(output, train__train_iters=CLOCK_STEPS, **settings),
            "--nproc",
            "2",
            "--max-restarts",
            "2",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if output.name == "jumps":
            environment |= {"LD_PRELOAD": str(library), "TEST_CLOCK": str(offset)}
        log = output.with_suffix(".log")
        with open(log, "w") as file:
            running = subprocess.Popen(
                [sys.executable, "-m", "megalith", *command], stdout=file, stderr=file, env=environment
            )
        jumps = iter([(10, DAY), (30, -30 * DAY)]) if output.name == "jumps" else iter(())
        jump = next(jumps, None)
        while running.poll() is None:
            if jump and len(steps(output)) >= jump[0]:
                with offset.open("r+b") as mapped:  # in place: to read a file cut to 0 bytes is a SIGBUS
                    mapped.write(jump[1].to_bytes(8, "little", signed=True))
                jump = next(jumps, None)
            time.sleep(0.02)
        text = log.read_text()
        assert running.returncode == 0 and jump is None, text
        assert "restarting" not in text and "warning" not in text
    assert left_by(outputs[0], CLOCK_STEPS)[:2] == left_by(outputs[1], CLOCK_STEPS)[:2]


@pytest.mark.fault(25)
def test_of_two_jobs_that_begin_at_once_in_one_folder_one_trains_and_one_is_refused(tmp_path, undisturbed):  # noqa: F811
    output = tmp_path / "run"
    command = training(output)
    at = command.index("--checkpoint.load")
    del command[at : at + 2]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_FAILURES": "[]"}
    both = [Forked([MAIN, *command, "--nproc", "2"], log, env=environment) for log in logs]
    codes = [finish(each) for each in both]
    texts = [log.read_text() for log in logs]
    assert sorted(codes) == [0, 2], texts
    refused = texts[codes.index(2)]
    assert "in use by" in refused or "already" in refused, refused
    assert state_of(output) == undisturbed(training)
