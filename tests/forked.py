"""`python …` as a fork of a process that has torch and this package loaded, which starts in 0.1 s instead of 5 s.

The fork behaves like a new process, with its own environment, signals, exit code and output. Ranks that a launcher in
it starts are its children, forked in turn.
"""

import functools
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalith.launch.pool import PRELOADED

PATIENCE = 600.0  # seconds for a process to reach the state that a test waits for
DESCRIPTORS = 4096  # limit of open files per process
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
OURS: list[socket.socket] = []


def free_port() -> int:
    """Return a port for another process to listen at, which nobody else gets before that.

    The port is outside the kernel's ephemeral range. An abstract socket with the port in its name, open until this
    process ends, keeps other test processes from choosing the same port.
    """
    first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    ports = [port for port in range(10_000, 2**16) if not first <= port <= last] or range(10_000, 2**16)
    chance = random.SystemRandom()
    while True:
        port, ours = chance.choice(ports), socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            ours.bind(f"\0megalith tests at port {port}")
            OURS.append(ours)
            return port
        ours.close()


def is_running(pid: int) -> bool:
    """Return True if a process runs; False also for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@functools.cache
def open_forkserver() -> multiprocessing.context.ForkServerContext:
    """Start the process that all test processes and pools are forked from, with imports and warm-up (warm.py) done."""
    processes = multiprocessing.get_context("forkserver")
    modules = ["megalith.training.training_job", "megalith.cli.main", "megalith.launch.agent", "pytest"]
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "mixtral")]
    if not torch.cuda.is_available():  # should they start CUDA, what is forked could not use it
        modules += ["torch._inductor.compile_fx", "warm"]
    processes.set_forkserver_preload([*PRELOADED, *modules])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return processes


class Forked:
    """A running `python *words`, with the part of subprocess.Popen's interface that tests need."""

    def __init__(
        self,
        words: Sequence[object],
        log: Path,
        errors: Path | None = None,
        env: Mapping[str, str] | None = None,
    ):
        """Append standard output to `log`, and standard error to `errors` (None: to `log` too)."""
        processes = open_forkserver()
        for path in filter(None, (log, errors)):
            path.touch()
        environment = dict(os.environ if env is None else env)
        given = ([str(word) for word in words], os.getcwd(), environment, str(log), str(errors or log))
        self._process = processes.Process(target=_become, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code: negative if a signal ended the process, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the forked process", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    words: Sequence[object], env: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess:
    """Run `python *words` to its end, as subprocess.run with its output captured as text."""
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder, "log"), Path(folder, "errors")
        running = Forked(words, log, errors, env)
        try:
            code = running.wait(timeout)
        finally:
            running.kill()
        return subprocess.CompletedProcess(words, code, log.read_text(), errors.read_text())


class ForkedPopen(subprocess.Popen):
    """Popen that starts `python …` as a fork of this process, and other programs as usual."""

    def _execute_child(self, *args, **options):
        given = inspect.signature(super()._execute_child).bind(*args, **options).arguments
        program, *words = map(os.fspath, given["args"])
        if program != sys.executable:
            return super()._execute_child(*args, **options)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if given["start_new_session"]:
                os.setsid()
            for descriptor, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
                if given[name] != -1:
                    os.dup2(given[name], descriptor)
            passed = sorted(given["pass_fds"])
            for first, end in zip((3, *(each + 1 for each in passed)), (*passed, DESCRIPTORS)):
                os.closerange(first, end)
            _run_python(words, given["env"] or dict(os.environ))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


def _become(words: list[str], folder: str, environment: dict[str, str], log: str, errors: str) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for descriptor, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
    subprocess_handler.Popen = ForkedPopen  # a launcher's
    _run_python(words, environment)


def _run_python(words: list[str], environment: dict[str, str]) -> None:
    """Run `python *words` in this process to its end."""
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):  # a new program has no handlers
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.excepthook = sys.__excepthook__
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))  # as at its start
    words = [word for word in words if word != "-u"]
    kind = words[0] if words[0] in ("-c", "-m") else None
    sys.argv = words[1:] if kind else words
    code: object = 0
    try:
        if kind == "-c":
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(bool(code)))
