"""TCP stores: serve one, or connect to one that another process serves.

torch's TCPStore listens on every interface, whatever address it is given. `serve_store` passes it a socket that is
already bound, so that a job on one machine listens on loopback only.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from megalith.errors import ConfigError
from megalith.launch.network import LOOPBACK, is_loopback

BACKLOG = 16384  # pending connections: all ranks of a job connect at once
CONNECT_TIMEOUT = 600.0  # seconds to wait for the process that serves the store
NOTICE_AFTER = 10.0  # seconds without a listener after which a line is printed
ANSWER_TIMEOUT = 10.0  # seconds in which a store has to answer after it accepted a connection


def serve_store(host: str = LOOPBACK, port: int = 0, timeout: timedelta | None = None) -> TCPStore:
    """Serve a store in this process.

    Args:
        host: a loopback address serves processes on this machine only.
        port: 0 chooses a free port.
        timeout: maximum time that a read waits for its key.

    Raises:
        OSError: the port is taken.
    """
    if is_loopback(host):
        is_v6 = ":" in host
        listening = socket.create_server(
            (host if is_v6 else LOOPBACK, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=BACKLOG,
        )
    elif socket.has_dualstack_ipv6():
        listening = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listening = socket.create_server(("", port), backlog=BACKLOG)
    port = listening.getsockname()[1]
    options = {} if timeout is None else {"timeout": timeout}
    address = host if is_loopback(host) else LOOPBACK
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), **options
    )


def connect_store(
    host: str, port: int, timeout: timedelta, connect_timeout: float = CONNECT_TIMEOUT
) -> TCPStore:
    """Connect to the store that another process serves at host:port.

    Args:
        host: host name or address.
        port: port.
        timeout: how long a read waits for its key.
        connect_timeout: seconds to wait for the server.

    Raises:
        ConfigError: nothing listens there in time, or the listener is not a store. torch would wait forever for the
            answer of such a listener, so a thread connects.
    """
    _await_listener(host, port, time.monotonic() + connect_timeout)
    results: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            wait = min(timeout, timedelta(seconds=ANSWER_TIMEOUT))
            results.append(TCPStore(host, port, timeout=wait, wait_for_workers=False))
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT)
    if not results or not isinstance(results[0], TCPStore):
        raise not_a_rendezvous(host, port)
    results[0].set_timeout(timeout)
    return results[0]


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Wait until a server listens at host:port and, like a TCP store, sends nothing before the client does."""
    notice_at: float | None = time.monotonic() + NOTICE_AFTER
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=ANSWER_TIMEOUT)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"nothing listens on {host}:{port} ({error.strerror or error}); start the process that serves the "
                    "rendezvous there, or use the address where it runs"
                ) from None
            if notice_at is not None and time.monotonic() > notice_at:
                print(
                    f"nothing answers at {host}:{port} yet ({error.strerror or error}); test it with `megalith doctor "
                    f"--reach {host}:{port}`; waiting {deadline - time.monotonic():.0f} s more",
                    file=sys.stderr,
                )
                notice_at = None
            time.sleep(0.2)
    with connection:
        connection.settimeout(0.2)
        try:
            connection.recv(1)
        except TimeoutError:
            return
        except OSError:
            pass
        raise not_a_rendezvous(host, port)  # it sent first, or closed the connection


def not_a_rendezvous(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"the program that listens on {host}:{port} does not answer as a job's rendezvous; choose "
        "a port that no other program on that machine uses"
    )
