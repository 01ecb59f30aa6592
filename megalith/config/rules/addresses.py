"""Addresses of servers in settings."""

from __future__ import annotations

from urllib.parse import urlsplit

from megalith.errors import ConfigError


def check_address(url: str, setting: str) -> None:
    """Raise ConfigError unless `url` is the address of a server."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is not a number, an incomplete IPv6 address
        wrong = True
    if wrong:
        raise ConfigError(f"{setting} is {url!r}, but must be an address such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise ConfigError(
            f"{setting} has a user name for {parts.hostname}, but Megalith sends no password to servers; leave the "
            "user name out, and run the server in a network that only the job can reach"
        )
