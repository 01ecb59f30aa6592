"""Record the terminal pictures: `python -m pictures.record` runs the commands in a terminal of 100 columns.

The output goes to recordings/ as text with ANSI colours. `make pictures` draws it. Run it in a folder with examples/ of
the checkout and the data of `make train`; chat also needs the run of examples/notebooks/finetune_and_chat.py.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

RECORDINGS = Path(__file__).parent / "recordings"
COLUMNS = 100
COMMANDS: dict[
    str, tuple[str, str | None]
] = {  # name → command, text at which the screen is kept (None: at the end)
    "run": (
        "megalith train examples/quickstart.yaml --train.train_iters 60 --log.log_interval 10",
        "step 54/60",
    ),
    "chat": (
        'megalith chat runs/chat --message "What is the capital of Italy?" \\\n'
        '    --message "Name the capital of Peru." --temperature 0',
        None,
    ),
    "plan": ("megalith plan llama3-8b --gpus 8 --device H100 --top 4", None),
}
CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


def screen(output: str) -> list[str]:
    """Return the lines of a terminal after `output`, with their colours."""
    lines, row, starts_line = [""], 0, False
    for match in CODE.finditer(output):
        part, number, letter = match[0], match[1], match[2]
        if part == "\n":
            row, starts_line = row + 1, False
            lines += [""] * (row == len(lines))
        elif part == "\r":
            starts_line = True
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            lines[row], starts_line = "", False
        elif letter in (None, "m"):
            lines[row] = part if starts_line else lines[row] + part
            starts_line = False
    return [line.rstrip() for line in lines]


def record(
    command: str, until: str | None, on_output: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Run a command in a terminal; return the lines on its screen when `until` is printed, or at the end.

    Raises:
        RuntimeError: the command failed, or did not print `until`.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", ""))]
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=subprocess.DEVNULL, env=variables
    )
    os.close(follower)
    output, kept = b"", None
    while True:
        try:
            more = os.read(leader, 1 << 16)
        except OSError:  # the command has ended
            break
        if not more:
            break
        output += more
        if until is not None and kept is None and until.encode() in output:
            kept = output
    os.close(leader)
    if process.wait() or (until is not None and kept is None):
        ended = f"ended with {process.returncode}" + ("" if until is None else f" and without {until!r}")
        raise RuntimeError(f"{command} {ended}; the recording is unchanged. Does it have its data?")
    return screen((kept or output).decode(errors="replace"))


def main() -> None:
    """Record the commands that are named, or all."""
    for name in sys.argv[1:] or COMMANDS:
        command, until = COMMANDS[name]
        shown = [f"\x1b[1m{line}\x1b[0m" for line in f"$ {command}".splitlines()]
        lines = [*shown, *record(command, until)]
        (RECORDINGS / f"{name}.ansi").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
