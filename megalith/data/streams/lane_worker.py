"""Worker processes that make the samples of lanes, and the training process's handle for them.

A worker is a new Python process that imports neither torch nor the main script. It makes samples of all its lanes in
turn until each lane has `ahead` unread samples. It ends when the training process closes the connection or dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from megalith.child_process import python_command
from megalith.data.preprocessing.encoding import LIBRARY_THREADS
from megalith.data.streams.lane import Lane, LanePosition, StreamSettings
from megalith.errors import ConfigError, DataError, MegalithError

Failure = tuple[str, str]  # name of the error's class, message
ERRORS = {error.__name__: error for error in (ConfigError, DataError)}


class LaneSample(NamedTuple):
    """A sample of a lane, the position after it, and the unusable documents since the previous sample."""

    tokens: np.ndarray
    """int32 [seq_length + 1]."""
    position: LanePosition
    skipped: int
    """Unusable documents of the lane so far."""
    bad_lines: list[str]


def next_of(lane: Lane) -> LaneSample:
    """Return the next sample of a lane."""
    tokens, bad_lines = lane.next_sample(), lane.bad_lines
    lane.bad_lines = []
    return LaneSample(tokens, lane.position, lane.skipped, bad_lines)


class LaneWorker:
    """The training process's handle of a worker process.

    Args:
        settings: settings of the stream.
        ahead: maximum number of samples per lane that are made before they are needed.
    """

    def __init__(self, settings: StreamSettings, ahead: int):
        environment = {**os.environ, LIBRARY_THREADS: "false"}  # one worker, one core
        self._process = subprocess.Popen(
            python_command(main), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._output = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._input = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._unread: dict[int, deque[LaneSample | Failure]] = {}
        self.close = weakref.finalize(self, _close, self._process, self._output, self._input)
        self._send((settings, ahead))

    def open(self, lane: int, position: LanePosition) -> None:
        """Begin to make samples of a lane."""
        self._unread[lane] = deque()
        self._send((lane, position))

    def next(self, lane: int) -> LaneSample:
        """Return the next sample of a lane. Raise the lane's error if it has no further sample."""
        while not self._unread[lane]:
            try:
                number, result = self._input.recv()
            except EOFError:
                raise self._ended() from None
            self._unread[number].append(result)
        result = self._unread[lane].popleft()
        if not isinstance(result, LaneSample):
            kind, message = result
            raise ERRORS.get(kind, DataError)(message)
        self._send((lane, None))
        return result

    def _send(self, message: object) -> None:
        try:
            self._output.send(message)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> DataError:
        status = self._process.wait()
        return DataError(
            f"a worker process that tokenizes a stream ended early (exit status {status}), perhaps killed for lack "
            "of memory, or its traceback is above; lower data.num_workers or data.shuffle_buffer"
        )


def _close(process: subprocess.Popen, *connections: Connection) -> None:
    for connection in connections:
        connection.close()
    process.stdin.close()
    process.stdout.close()
    process.kill()  # it may wait for the network
    process.wait()


def main() -> None:
    """Run a worker process, with messages over standard input and output."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the training process handles interrupts and ends its workers
    messages, results = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what libraries print
    with suppress(EOFError, ConnectionError):  # once the training process has ended
        _serve(messages, results)


def _serve(messages: Connection, results: Connection) -> None:
    settings, ahead = messages.recv()
    lanes: dict[int, Lane] = {}
    wanted: dict[int, int] = {}  # samples to make, by lane; none of a lane after its error
    while True:
        while messages.poll() or not any(wanted.values()):
            lane, position = messages.recv()
            if position is not None:
                lanes[lane], wanted[lane] = Lane(settings, lane, position), ahead
            elif lane in wanted:
                wanted[lane] += 1
        for lane in [lane for lane, count in wanted.items() if count]:
            try:
                results.send((lane, next_of(lanes[lane])))
                wanted[lane] -= 1
            except MegalithError as error:
                results.send((lane, (type(error).__name__, str(error))))
                del wanted[lane]
