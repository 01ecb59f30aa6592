"""Record the terminal pictures: `python -m pictures.record` runs the commands in a terminal of 100 columns.

The output goes to recordings/ as text with ANSI colours. `make pictures` draws it. Run it in a folder with examples/ of
the checkout and the data of `make train`; chat also needs the run of examples/notebooks/finetune_and_chat.py.
`first_hour` runs docs/first_hour/cpu.md in a fresh clone, installation included.
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
from collections.abc import Sequence
from pathlib import Path

RECORDINGS = Path(__file__).parent / "recordings"
FIRST_HOUR = Path(__file__).parents[2] / "docs" / "first_hour" / "cpu.md"
COLUMNS = 100
FIRST, LAST = 4, 7  # lines that the first hour keeps of a command's output
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


def record(command: str, words: Sequence[str], until: str | None = None) -> list[str]:
    """Run a command in a terminal; return the lines on its screen when `until` is printed, or at the end.

    Args:
        command: the command as it is typed.
        words: the program to run for it, and its arguments.
        until: text at which the screen is kept.

    Raises:
        RuntimeError: the command failed, or did not print `until`.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "COLORTERM": "truecolor"}
    variables["PIP_QUIET"] = "1"  # it would print the machine's indexes and folders
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
    lines = screen((kept or output).decode(errors="replace"))
    return lines[: max((number for number, line in enumerate(lines, 1) if line), default=0)]


def record_first_hour() -> list[str]:
    """Run the commands of the first hour's page for a CPU, and return their output, shortened."""
    blocks = re.findall(
        r"^```bash\n(.*?)^```", FIRST_HOUR.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    commands = [
        command.partition("  #")[0].rstrip()
        for block in blocks
        if not block.startswith("# needs a GPU")
        for command in re.split(r"(?<!\\)\n", block)
        if command and not command.startswith("#")
    ]
    lines: list[str] = []
    for command in commands:
        activate = ". .venv/bin/activate && " if Path(".venv/bin/activate").exists() else ""
        printed = record(command, ["bash", "-c", activate + command])
        if len(printed) > FIRST + LAST + 1:
            printed = [*printed[:FIRST], "\x1b[2m…\x1b[0m", *printed[-LAST:]]
        lines += [*typed(command), *printed]
        print(f"recorded: {command}", flush=True)
    return lines


def typed(command: str) -> list[str]:
    """Return the lines of a command after the prompt, broken at the terminal's edge."""
    lines = f"$ {command}".splitlines()
    parts = [line[at : at + COLUMNS] for line in lines for at in range(0, len(line), COLUMNS)]
    return [f"\x1b[1m{part}\x1b[0m" for part in parts]


def main() -> None:
    """Record the commands that are named, or all but the first hour."""
    for name in sys.argv[1:] or COMMANDS:
        if name == "first_hour":
            lines = record_first_hour()
        else:
            command, until = COMMANDS[name]
            words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", ""))]
            lines = [*typed(command), *record(command, words, until)]
        (RECORDINGS / f"{name}.ansi").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
