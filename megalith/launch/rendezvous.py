"""Rendezvous: the store of a job, which one of its processes serves, and what listens for it.

The processes of one machine use its loopback interface, which no other machine reaches. torch's own store listens on
every interface whatever address it is given, so it gets a socket here that is bound already. Launchers of several
machines rendezvous at `--rdzv-endpoint` through torch elastic, which pickles its state: everyone who reaches that port
is trusted (docs/reliability.md).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore

from megalith.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("lo", "lo0")
SIOCGIFADDR = 0x8915  # Linux: an interface's address
BACKLOG = 16384  # connections that wait to be accepted: every rank of a job comes at once
HOST_PATIENCE = 600.0  # seconds that a machine waits for the one that holds the store
TELL_AFTER = 10.0  # seconds after which it is logged what is waited for
ANSWER_PATIENCE = 10.0  # seconds in which a store answers whom it has let connect
LOOKS_EVERY = 1.0  # seconds between a launcher's looks at the others while their ranks connect
SILENCE = 60  # looks after which a launcher of which nothing is heard is lost: one that is held up itself looks less
RELAY = 15.0  # seconds that the launcher of the store waits for the others to have read why the job fails
CONNECTED_FILE = "MEGALITH_CONNECTED_FILE"  # a launcher's: a byte of each of its ranks that has connected
JOB = "MEGALITH_JOB"  # names the job that a launcher has started: the same for all of its ranks and attempts


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def use_loopback_interface() -> None:
    """The process groups of this process listen on the loopback interface, unless the environment names another."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_NAMES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_network_interface(host: str, port: int) -> None:
    """The process groups of this process listen on the interface that reaches `host`, unless the environment names
    another: gloo would take what the machine's own name resolves to, which may be loopback (127.0.1.1 on Debian)."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):
        own = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        if not is_loopback(own):
            return
    with suppress(OSError):
        name = _interface_of(address_towards(host, port))
        if name is not None and name not in LOOPBACK_NAMES:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address; None where there is none, or this is no Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def serve_store(host: str = LOOPBACK, port: int = 0, timeout: timedelta | None = None) -> TCPStore:
    """A store that this process holds, at `port` (0: a free one); reached by loopback alone where `host` is that.

    `timeout` is how long a read waits for its key. Raises OSError where the port is taken.
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


def connect_store(host: str, port: int, timeout: timedelta, patience: float = HOST_PATIENCE) -> TCPStore:
    """The store that another process holds at host:port, as soon as there is one, for at most `patience` seconds.

    Raises ConfigError where nothing listens there by then, or what does is no store. torch would wait for its answer
    for ever, so it is asked in a thread.
    """
    _await_listener(host, port, time.monotonic() + patience)
    found: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            wait = min(timeout, timedelta(seconds=ANSWER_PATIENCE))
            found.append(TCPStore(host, port, timeout=wait, wait_for_workers=False))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_PATIENCE)
    if not found or not isinstance(found[0], TCPStore):
        raise no_rendezvous(host, port)
    found[0].set_timeout(timeout)
    return found[0]


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Returns when something at host:port lets itself be connected to and, like a store, waits to be asked. Tells once
    that it waits."""
    tell_at: float | None = time.monotonic() + TELL_AFTER
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=ANSWER_PATIENCE)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"nothing has come to listen at {host}:{port} ({error.strerror or error}); start the process that "
                    "holds the meeting there, or name the address at which it does"
                ) from None
            if tell_at is not None and time.monotonic() > tell_at:
                print(
                    f"nothing answers at {host}:{port} yet ({error.strerror or error}); `megalith doctor --reach "
                    f"{host}:{port}` tries it; waiting {deadline - time.monotonic():.0f} s more",
                    file=sys.stderr,
                )
                tell_at = None
            time.sleep(0.2)
    with connection:
        connection.settimeout(0.2)
        try:
            connection.recv(1)
        except TimeoutError:
            return
        except OSError:
            pass
        raise no_rendezvous(host, port)  # it spoke first, or hung up


def no_rendezvous(host: str, port: int) -> ConfigError:
    return ConfigError(
        f"what listens at {host}:{port} is no rendezvous of a job: it does not answer as one; choose a port that no "
        "other program of that machine uses"
    )


class PeerWatch:
    """What a launcher hears of those of the other machines while their ranks connect.

    A rank whose peer has gone before they are connected would wait for its timeout: there is no connection yet that
    could break. So each launcher that fails for good leaves its sentence in the rendezvous' store, and each listens for
    the heartbeat of the next one. Once its own ranks are connected a launcher is at rest.
    """

    FAILED, NOTED = "megalith/failed", "megalith/noted"

    def __init__(self, store: Store, rank: int, machines: int, connected: Path, ranks: int):
        """`store`: of this round's rendezvous; `connected`: see CONNECTED_FILE, of `ranks` ranks."""
        self._store, self._rank, self._machines = store, rank, machines
        self._connected, self._ranks = connected, ranks
        self._beats, self._next_look = 0, 0.0
        self._heard, self._heard_at, self._unheard = b"", time.monotonic(), 0
        self.rests = machines == 1

    def look(self) -> str:
        """Why the ranks of this machine will never connect, a sentence; empty while they may. Takes little time."""
        now = time.monotonic()
        if self.rests or now < self._next_look:
            return ""
        self._next_look = now + LOOKS_EVERY
        try:
            if self._connected.exists() and self._connected.stat().st_size >= self._ranks:
                self._store.set(self._beat_of(self._rank), "at rest")
                self.rests = True
                return ""
            self._beats += 1
            self._store.set(self._beat_of(self._rank), f"{self._beats} {socket.gethostname()}")
            if not self._store.check([self.FAILED]):
                self._listen(now)
            if self._store.check([self.FAILED]):
                self._store.add(self.NOTED, 1)
                return self._store.get(self.FAILED).decode()
        except RuntimeError:  # torch's errors of a store
            return "the launcher that holds the rendezvous has ended or is no longer reached; look at what it says"
        return ""

    def _listen(self, now: float) -> None:
        other = (self._rank + 1) % self._machines
        key = self._beat_of(other)
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != self._heard or beat == b"at rest":
            self._heard, self._heard_at, self._unheard = beat, now, 0
            return
        self._unheard += 1
        if self._unheard > SILENCE:
            host = beat.decode().partition(" ")[2] or f"number {other}"
            self._store.set(
                self.FAILED,
                f"nothing has been heard for {now - self._heard_at:.0f} s of the launcher on machine {host}, while the "
                "ranks connect",
            )

    def tell(self, sentence: str, serves_store: bool) -> None:
        """Leaves for the others why the job has failed for good. Who holds the store stays until they have read it."""
        if self.rests:
            return
        with suppress(RuntimeError):
            if not self._store.check([self.FAILED]):
                self._store.set(self.FAILED, f"on machine {socket.gethostname()}: {sentence}")
            deadline = time.monotonic() + (RELAY if serves_store else 0)
            while self._store.add(self.NOTED, 0) < self._machines - 1 and time.monotonic() < deadline:
                time.sleep(0.1)

    def _beat_of(self, rank: int) -> str:
        return f"megalith/beat/{rank}"


def await_name(host: str, patience: float = HOST_PATIENCE) -> None:
    """Returns when `host` is a name that resolves, for at most `patience` seconds: a pod may start before its name is
    known, to itself too."""
    deadline = time.monotonic() + patience
    while host != socket.gethostname() and time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError:
            time.sleep(0.5)


def is_this_host(host: str) -> bool:
    """Whether `host` is this machine: its own name, or an address that one of its interfaces has."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {(family, where[0]) for family, *_, where in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((address, 0))
            return True
    return False


def address_towards(host: str, port: int) -> str:
    """The address of this machine that one which it reaches as `host` answers to."""
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(where)  # sends nothing
        return route.getsockname()[0]
