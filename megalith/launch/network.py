"""Hostnames, addresses and network interfaces of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("lo", "lo0")
Connections = set[tuple[int, int]]  # file descriptor and inode of each socket
SIOCGIFADDR = 0x8915  # Linux: ioctl for an interface's address
NAME_TIMEOUT = 600.0  # seconds


def is_loopback(host: str) -> bool:
    """Return True if only processes on this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def use_loopback_interface() -> None:
    """Make gloo and NCCL use the loopback interface, unless the environment names another."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_NAMES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_network_interface(host: str, port: int) -> None:
    """Make gloo use the interface that reaches `host`, unless the environment names another.

    gloo's default is the address that the hostname resolves to, which may be loopback (127.0.1.1 on Debian).
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):
        address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        if not is_loopback(address):
            return
    with suppress(OSError):
        name = _interface_of(address_towards(host, port))
        if name is not None and name not in LOOPBACK_NAMES:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address. None if there is none, or off Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return None


def await_name(host: str, timeout: float = NAME_TIMEOUT) -> None:
    """Wait until `host` resolves, for at most `timeout` seconds. A pod may start before its own name resolves."""
    deadline = time.monotonic() + timeout
    while host != socket.gethostname() and time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError:
            time.sleep(0.5)


def is_this_host(host: str) -> bool:
    """Return True if `host` is this machine's name or an address of one of its interfaces."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {(family, address[0]) for family, *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((address, 0))
            return True
    return False


def address_towards(host: str, port: int) -> str:
    """Return the address that this machine uses to reach `host`."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(address)  # sends nothing
        return route.getsockname()[0]


def open_connections() -> Connections:
    """Return this process's sockets. Empty off Linux."""
    sockets = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:["):
                    sockets.add((int(name), int(link[8:-1])))
    return sockets


@contextmanager
def limited_silence(seconds: float) -> Iterator[None]:
    """Return a context manager in which new TCP connections fail if the peer does not answer for `seconds`.

    Most operations of torch's TCPStore wait without a timeout. After a link has been cut, they would wait until the
    kernel stops retransmitting (a quarter of an hour), or forever if they have nothing to send.
    """
    before = open_connections()
    yield
    for descriptor, _ in open_connections() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                _limit_silence(connection, seconds)


def _limit_silence(connection: socket.socket, seconds: float) -> None:
    """Limit how long packets may stay unanswered, and send keep-alive packets while the connection is idle."""
    interval = max(1, round(seconds / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", round(1000 * seconds)),
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut_down(sockets: Connections) -> None:
    """Shut down the open TCP connections in `sockets`. Pending and later reads and writes fail immediately."""
    for descriptor, inode in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and (
                os.fstat(connection.fileno()).st_ino == inode
            ):
                connection.getpeername()  # fails for a socket that listens
                connection.shutdown(socket.SHUT_RDWR)
