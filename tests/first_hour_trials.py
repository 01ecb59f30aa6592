"""The commands of docs/first_hour/cpu.md on a clean machine (`make first-hour`): a fresh clone, a fresh environment.

It prints the seconds of each command, by wall clock and by processor, and its output. The environment takes packages
from where pip is set up to find them. Nothing but Python, git and the packages of the page is used.

    python tests/first_hour_trials.py [--folder FOLDER] [--gpu] [--small] [--skip-install]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page_trials import ROOT, fences, instead, lines_of, small_words

PAGE = ROOT / "docs" / "first_hour" / "cpu.md"
INSTALL = ("python3 -m venv", "pip install")


def commands(on_gpu: bool) -> list[str]:
    """Return the page's commands in order; those of a GPU if `on_gpu`."""
    listed: list[str] = []
    for language, block in fences(PAGE):
        if language == "bash" and (on_gpu or not block.startswith("# needs a GPU")):
            listed += [line.partition("  #")[0].rstrip() for line in lines_of(block)]
    return listed


def run(command: str, folder: Path) -> tuple[float, float, int]:
    """Run a command in the clone. Return its wall time and processor time in seconds, and its exit code."""
    activate = ". .venv/bin/activate && " if (folder / ".venv" / "bin" / "activate").exists() else ""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        ["bash", "-c", activate + command], cwd=folder, env=environment, stdin=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.monotonic() - start, processor, done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the clone is made, and left")
    parser.add_argument("--gpu", action="store_true", help="also the commands that need a GPU")
    parser.add_argument("--small", action="store_true", help="a few steps per training, to try the commands")
    parser.add_argument("--skip-install", action="store_true", help="use the environment that --folder has")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute() / "megalith"
        if not options.skip_install:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        times = []
        for command in commands(options.gpu):
            if options.skip_install and command.startswith(INSTALL):
                continue
            if options.small:
                command = instead(f"{command}{small_words(command)}", PAGE.relative_to(ROOT).as_posix())
            print(f"\n$ {command}", flush=True)
            wall, processor, code = run(command, folder)
            times.append((wall, processor, command))
            if code:
                sys.exit(f"exit code {code}: {command}")
        print("\n    wall  processor, seconds")
        for wall, processor, command in times:
            print(f"{wall:8.1f}{processor:9.1f}  {command[:90]}")
        print(f"{sum(wall for wall, *_ in times):8.1f}{sum(cpu for _, cpu, _ in times):9.1f}  in all")


if __name__ == "__main__":
    main()
