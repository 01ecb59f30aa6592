"""A store that resets connections, throttles, loses answers and cuts uploads and downloads short, over ten seeds.

A proxy in front of a server that speaks S3's protocol makes the faults. Each step that the store then lists is whole,
and a run continues from it.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from s3_store import s3_store
from storage_job import run_config

import megalith
from megalith.checkpoint import list_steps, open_existing
from megalith.checkpoint.open import step_problems
from megalith.errors import CheckpointError, MegalithError
from megalith.remote import open_location

pytest.importorskip("s3fs", reason="pip install 'megalith[test]'")
pytestmark = pytest.mark.full

FAULTS = "reset", "throttle", "lost answer", "cut upload", "cut download", "slow"
SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to `upstream`, with faults by `chance`."""

    protocol_version = "HTTP/1.1"
    upstream: tuple[str, int]
    chance = random.Random(0)
    rate = 0.0
    made: Counter
    lock = threading.Lock()

    def _serve(self) -> None:
        with self.lock:
            fault = self.chance.choice(FAULTS) if self.chance.random() < self.rate else ""
            self.made[fault] += 1
        length = int(self.headers.get("Content-Length", 0))
        if fault == "cut upload" and length:
            self.rfile.read(length // 2)
            return self._reset()
        body = (
            self._chunks()
            if "chunked" in self.headers.get("Transfer-Encoding", "")
            else self.rfile.read(length)
        )
        if fault == "reset":
            return self._reset()
        if fault == "throttle":
            return self._reply(503, [("Content-Type", "application/xml")], SLOW_DOWN)
        if fault == "slow":
            time.sleep(0.3)
        connection = http.client.HTTPConnection(*self.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in DROPPED}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "lost answer":
            return self._reset()
        dropped = DROPPED - {"content-length"} if self.command == "HEAD" else DROPPED
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in dropped]
        self._reply(response.status, kept, content, cut=fault == "cut download")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False) -> None:
        self.close_connection = True
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """Close the connection with a reset instead of an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *_: object) -> None: ...


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None: ...


DROPPED = {"host", "connection", "transfer-encoding", "content-length", "expect"}


@pytest.fixture(scope="module")
def store():
    """Environment variables of a client of the proxy, and the proxy's handler."""
    Proxy.made = Counter()
    front = QuietServer(("127.0.0.1", 0), Proxy)

    def start(host: str, port: int) -> str:
        Proxy.upstream = host, port
        threading.Thread(target=front.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{front.server_port}"

    with s3_store(in_front=start):
        yield Proxy
    front.shutdown()


END = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    result = megalith.train(run_config(output, save_interval=2))
    assert result.step == END
    return result.loss


@pytest.mark.parametrize("rate", [0.1, 0.5], ids=["a tenth", "half"])
@pytest.mark.parametrize("seed", range(10))
def test_a_store_that_fails_at_random_never_lists_a_step_that_is_not_whole(
    tmp_path, store, undisturbed, seed, rate
):
    url = f"s3://bucket/{seed}-{rate}"
    store.chance, store.rate, store.made = random.Random(f"{seed} {rate}"), rate, Counter()
    config = run_config(tmp_path / "run", save_interval=2, save=url, load=url, max_failed_saves=99)
    failed = 0
    for _ in range(8):
        try:
            loss = megalith.train(config).loss
            assert loss is None or loss == pytest.approx(undisturbed, abs=1e-6)  # None: it was complete
            break
        except MegalithError as error:  # a sentence, after which the job is started again
            failed += 1
            assert str(error)
            if isinstance(error, CheckpointError) and "could not be saved" in str(error):
                store.rate = 0.0
    made, store.rate = store.made, 0.0
    assert sum(made.values()) > made[""], made
    for folder in list_steps(open_location(url) / "checkpoints").values():
        assert step_problems(folder) == [], (made, folder)
    megalith.train(config)
    assert open_existing(url).folder.name == f"step_{END:08d}"
    print(f"seed {seed}: {dict(made)}, {failed} starts failed")
