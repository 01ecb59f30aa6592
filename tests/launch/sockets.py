"""What a process listens at."""

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"
LOOPBACK_INTERFACE = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def listening(pid: int) -> list[str]:
    """The addresses of the TCP sockets that the process `pid` listens at, one for each."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [_address(words[1]) for words in lines if words[3] == LISTENING and words[9] in inodes]


def _address(text: str) -> str:
    words = bytes.fromhex(text.partition(":")[0])  # 32-bit words, each in the machine's own order
    packed = b"".join(struct.pack("!I", word) for word in struct.unpack(f"={len(words) // 4}I", words))
    return str(ipaddress.ip_address(packed))
