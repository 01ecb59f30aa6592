"""Network checks: the rendezvous ports, the host name, and connections to other machines."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping

from megalith.doctor.checks import BAD, GOOD, WARN, Check, make_check
from megalith.errors import ConfigError

PORTS = {29500: "MASTER_PORT's default", 29400: "--rdzv-endpoint's default"}


def check_network(environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the rendezvous ports are free and that the host name resolves to an address others can reach."""
    ports = dict(PORTS)
    if master_port := environ.get("MASTER_PORT"):
        if (port := _parse_port(master_port)) is None:
            yield Check("MASTER_PORT", BAD, repr(master_port), "set it to a port, 1 to 65535, or unset it")
        else:
            ports = {port: "MASTER_PORT"} | ports
    taken = [f"{port} ({use})" for port, use in ports.items() if not _is_free(port)]
    finding = f"{', '.join(taken)} in use" if taken else f"{', '.join(map(str, ports))} free"
    yield make_check(
        "ports", finding, not taken, "choose another port: --rdzv-endpoint HOST:PORT, or MASTER_PORT"
    )
    name = socket.gethostname()
    advice = "for multi-node jobs, give --rdzv-endpoint an address that the other machines can reach"
    try:
        addresses = sorted({address[0] for *_, address in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield Check("host name", WARN, f"{name} does not resolve ({error.strerror})", advice)
        return
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    yield make_check("host name", f"{name} is {', '.join(addresses)}", not is_loopback, advice)


def _parse_port(text: str) -> int | None:
    """Return the port number, or None if `text` is not one."""
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 2**16 else None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port`. IPv6 addresses are written in brackets.

    Raises:
        ConfigError: `endpoint` is not host:port.
    """
    host, _, digits = endpoint.rpartition(":")
    if not host or (port := _parse_port(digits)) is None:
        raise ConfigError(f"--reach is {endpoint!r}, but must be HOST:PORT with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), port  # IPv6: [::1]:29500


def check_reachable(endpoint: str) -> Check:
    """Check that this machine can connect to `endpoint` (host:port)."""
    host, port = parse_endpoint(endpoint)
    try:
        start = time.perf_counter()
        with socket.create_connection((host, port), timeout=5):
            elapsed_ms = 1e3 * (time.perf_counter() - start)
        return Check(f"reach {endpoint}", GOOD, f"connected in {elapsed_ms:.1f} ms")
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        advice = "start the job's first machine, correct the address, or open the port between the machines"
        return Check(f"reach {endpoint}", BAD, getattr(error, "strerror", None) or str(error), advice)
