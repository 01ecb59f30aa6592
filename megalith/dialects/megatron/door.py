"""Commands for Megatron-LM users: run its programs with its flags, run its scripts, and list its flags.

    pretrain-gpt|-bert|-t5 FLAGS [--emit FILE] [--ignore-unknown] [--trust] [--nproc N]   also `torchrun … -m
                                                                   megalith.dialects.megatron`
    run SCRIPT.sh [ARGUMENTS] [--override 'FLAGS']
    install DIR
    flags [--json]

Megatron-LM's scripts end in `torchrun … ../../pretrain_gpt.py FLAGS`. `run` replaces the files in FILES, whatever their
path, by Megalith's: wrappers of `torchrun`, `python` and `uv` come first in PATH. `install` writes these files to a
folder where the script finds them. PyTorch is imported when a run starts, after the flags have been checked.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megalith.dialects.command_parser import CommandParser
from megalith.errors import ConfigError, MegalithError, did_you_mean, printable
from megalith.launch.parent import exit_with_launcher
from megalith.report.streams import guard_standard_streams

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MARK = "# Written by `megalith megatron install`: hands Megatron-LM's command line to Megalith."
FILES = {  # file in Megatron-LM's checkout → Megalith's command
    "pretrain_gpt.py": "pretrain-gpt",
    "examples/classes/pretrain_gpt.py": "pretrain-gpt",  # path in newer scripts
    "pretrain_mamba.py": "pretrain-gpt",
    "pretrain_hybrid.py": "pretrain-gpt",
    "pretrain_bert.py": "pretrain-bert",
    "pretrain_t5.py": "pretrain-t5",
    "tools/preprocess_data.py": "preprocess",
    "tools/checkpoint/convert.py": "convert-checkpoint",
    # Without an __init__.py, so that an installed package of the same name has priority.
    "megatron/bridge/convert.py": "convert",
}
OURS = ("convert",)  # commands of `megalith` itself
COMMAND_NOT_FOUND = 127  # exit code of bash
REACHED = "reached"  # file that a wrapper creates when it starts a Megalith command
PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
WRAPPERS = {"torchrun": "-m torch.distributed.run", **dict.fromkeys(PYTHONS, "")}
UV_VALUES = (  # options of uv and of `uv run` with a value
    "--allow-insecure-host|--cache-dir|--color|--config-file|--config-setting|-C|--default-index|--directory|--env-file|"
    "--exclude-newer|--extra|--extra-index-url|--find-links|-f|--group|--index|--index-strategy|--index-url|-i|"
    "--keyring-provider|--link-mode|--no-binary-package|--no-build-isolation-package|--no-build-package|--no-extra|"
    "--no-group|--only-group|--package|--prerelease|--project|--python|-p|--python-platform|--python-preference|"
    "--refresh-package|--reinstall-package|--resolution|--upgrade-package|-P|--with|-w|--with-editable|"
    "--with-requirements"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of COMMANDS, by default `pretrain-gpt`, and return its exit code. A MegalithError is printed."""
    exit_with_launcher()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with guard_standard_streams():
            return run_command(words)
    except MegalithError as error:
        from megalith.launch.failure import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_command(words: list[str]) -> int:
    """Run a command and return its exit code. Raises MegalithError."""
    if not words or words[0].startswith("-"):
        return pretrain(words)
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {words[0]!r} for Megatron{hint}")
    return COMMANDS[words[0]](words[1:])


def pretrain(words: list[str], program: str = "pretrain-gpt") -> int:
    """Train as Megatron's program would with these flags, or write the equivalent run file."""
    from megalith.dialects.megatron.translate import in_flags, translate

    if {"-h", "--help"} & set(words):
        print(f"{__doc__}\n`megalith megatron flags` lists Megatron's flags and what each means in Megalith.")
        return 0
    parser = CommandParser(program)
    parser.add_argument("--emit", metavar="FILE")
    parser.add_argument("--ignore-unknown", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--nproc", type=int)
    options, flags = parser.parse_known_args(words)
    world_size = options.nproc or int(os.environ.get("WORLD_SIZE", 0)) or None
    modes = dict(ignore_unknown=options.ignore_unknown, trust=options.trust, program=program)
    result = translate(flags, world_size, **modes)
    is_first = os.environ.get("RANK", "0") == "0"
    if os.environ.get(QUEUES) == "1" and not options.emit:
        del os.environ[QUEUES]
        result.notes.append(f"{QUEUES}=1 is not needed and is removed from the environment")
    if is_first and not (options.nproc and not options.emit):
        for note in result.notes:
            print(f"note: {printable(note)}", file=sys.stderr if options.emit else sys.stdout, flush=True)
    config = result.config()
    if options.emit:
        if options.emit == "-":
            print(result.to_yaml(), end="")
        else:
            Path(options.emit).write_text(result.to_yaml(), encoding="utf-8")
            print(f"wrote {printable(options.emit)}", file=sys.stderr)
        return 0
    if options.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        more = ["--ignore-unknown"] * options.ignore_unknown + ["--trust"] * options.trust
        with in_flags():
            return launch(
                options.nproc,
                ["-m", "megalith.dialects.megatron", program, *flags, *more],
                check=lambda world_sizes: check_job(config, world_sizes, options.nproc, True),
            )
    from megalith.launch.stops import exit_code
    from megalith.training.training_job import train

    with in_flags():
        return exit_code(train(config).ended)


def run(words: list[str]) -> int:
    """Run a script with Megalith's files in place of Megatron's."""
    parser = CommandParser("megalith megatron run")
    parser.add_argument("--override", default="", metavar="'FLAGS'")
    options, words = parser.parse_known_args(words)
    if not words:
        raise ConfigError("megalith megatron run needs a script: megalith megatron run SCRIPT.sh [ARGUMENTS]")
    return run_script(words[0], words[1:], options.override)


def install_files(words: list[str]) -> int:
    """Write files with the names of Megatron's programs, which call Megalith, to a folder."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(
            "megalith megatron install needs one folder, in which scripts look for pretrain_gpt.py"
        )
    for path in install(words[0]):
        print(f"wrote {printable(path)}")
    return 0


def flags(words: list[str]) -> int:
    """Print all flags of Megatron with their kind and meaning."""
    from megalith.dialects.megatron.translate import listing

    if words not in ([], ["--json"]):
        raise ConfigError(f"megalith megatron flags does not take {' '.join(words)!r}, only --json")
    table = listing()
    if words:
        print(json.dumps(table, indent=1, ensure_ascii=False))
        return 0
    width = max(map(len, table))
    for flag, row in table.items():
        print(f"{flag.ljust(width)}  {row['kind'].ljust(9)}  {row['means']}")
    return 0


def tool(name: str) -> Callable[[list[str]], int]:
    """Return a command that imports megatron_tools.py when it runs."""

    def call(words: list[str]) -> int:
        from megalith.dialects.megatron import megatron_tools

        return getattr(megatron_tools, name)(words)

    return call


def install(folder: str | Path) -> list[Path]:
    """Write FILES below `folder` and return their paths. Raises ConfigError if it would replace the user's files."""
    paths = {Path(folder) / name: command for name, command in FILES.items()}
    for path in paths:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(
                f"{path} exists and was not written by Megalith; choose another folder, or move it"
            )
    for path, command in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        home = "cli.main" if command in OURS else "dialects.megatron.door"
        path.write_text(
            f"{MARK}\nimport sys\n\nfrom megalith.{home} import main\n\n"
            f'if __name__ == "__main__":\n    sys.exit(main(["{command}", *sys.argv[1:]]))\n',
            encoding="utf-8",
        )
    return list(paths)


def run_script(script: str, arguments: list[str], override: str = "") -> int:
    """Run a script of Megatron-LM with bash, with Megalith's files in place of Megatron's, and return its exit code.

    Args:
        script: path of the shell script.
        arguments: arguments of the script.
        override: flags to append to the flags of a `pretrain_….py`; if a flag occurs twice, the last occurrence counts.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; pass the path of a shell script")
    if b"\r\n" in Path(script).read_bytes():
        raise ConfigError(
            f"{script} has Windows line endings, which bash reads as part of each line; remove them: "
            f"sed -i 's/\\r$//' {script}"
        )
    with tempfile.TemporaryDirectory(prefix="megalith-megatron-") as folder:
        install(folder)
        wrappers = Path(folder) / "bin"
        wrappers.mkdir()
        for name, module in WRAPPERS.items():
            (wrappers / name).write_text(_wrapper(folder, module, override), encoding="utf-8")
            (wrappers / name).chmod(0o755)
        (wrappers / "uv").write_text(_uv_wrapper(wrappers), encoding="utf-8")
        (wrappers / "uv").chmod(0o755)
        environment = {**os.environ, "PATH": f"{wrappers}{os.pathsep}{os.environ.get('PATH', '')}"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        code = subprocess.run(["bash", script, *arguments], env=environment, check=False).returncode
        if code and not (wrappers / REACHED).exists():
            print(f"{printable(script)} {_why_nothing_started(code)}", file=sys.stderr)
        return code


def _why_nothing_started(code: int) -> str:
    """Return the rest of a sentence on a script that ended with `code` before it started one of FILES."""
    ended = f"ended with exit code {code} before it started any of {', '.join(FILES)}"
    if code == COMMAND_NOT_FOUND:
        return (
            f"{ended}, because a command of the script is not installed (see bash's message); use torchrun or "
            "python in its place: Megalith needs no deepspeed, mpirun, srun or nsys to run on one machine"
        )
    return (
        f"{ended}: if it checks that the file exists, create it with `megalith megatron install DIR`, where DIR is the "
        "folder that the script uses"
    )


def _wrapper(folder: str, module: str, override: str) -> str:
    """Return a shell script that runs Python, with Megalith's file in place of the first argument that is in FILES."""
    cases = "\n".join(
        f"      {name} | */{name}) word={shlex.quote(f'{folder}/{name}')}; found={command} ;;"
        for name, command in FILES.items()
    )
    try:
        more = shlex.join(shlex.split(override))
    except ValueError as error:
        raise ConfigError(
            f"--override {override!r} cannot be split into words ({error}); correct its quotes"
        ) from None
    return f"""#!/bin/bash
words=() found=
for word in "$@"; do
  if [ -z "$found" ]; then
    case "$word" in
{cases}
    esac
  fi
  words+=("$word")
done
case "$found" in pretrain-*) words+=({more}) ;; esac
[ -z "$found" ] || : > {shlex.quote(f"{folder}/bin/{REACHED}")}
exec {shlex.quote(sys.executable)} {module} "${{words[@]}}"
"""


def _uv_wrapper(wrappers: Path) -> str:
    """Return a shell script for uv: `uv run [OPTIONS] COMMAND` with one of FILES runs COMMAND without uv, so that it
    finds the other wrappers in PATH; anything else runs uv."""
    ours = " | ".join(f"{name} | */{name}" for name in FILES)
    return f"""#!/bin/bash
found= is_run=
for word in "$@"; do
  case "$word" in
    {ours}) found=1 ;;
    run) is_run=1 ;;
  esac
done
if [ -z "$found" ] || [ -z "$is_run" ]; then
  PATH=${{PATH#{shlex.quote(f"{wrappers}:")}}} exec uv "$@"
fi
is_run=
while [ $# -gt 0 ]; do
  case "$1" in
    -m | --module) shift; exec python -m "$@" ;;
    --) shift; break ;;
    {UV_VALUES.replace("|", " | ")}) shift 2 ;;
    -*) shift ;;
    *) [ -z "$is_run" ] || break; is_run=1; shift ;;
  esac
done
case "$1" in *.py) exec python "$@" ;; esac
exec "$@"
"""


COMMANDS = {
    "pretrain-gpt": pretrain,
    "pretrain-bert": lambda words: pretrain(words, "pretrain-bert"),
    "pretrain-t5": lambda words: pretrain(words, "pretrain-t5"),
    "preprocess": tool("run_preprocess_data"),
    "convert-checkpoint": tool("run_convert_checkpoint"),
    "run": run,
    "install": install_files,
    "flags": flags,
}
