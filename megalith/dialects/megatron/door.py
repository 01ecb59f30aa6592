"""The commands of Megatron-LM's door: its programs by their flags, running its scripts, and the list of flags.

    pretrain-gpt|-bert|-t5 FLAGS [--emit FILE] [--ignore-unknown] [--trust] [--nproc N]   also `torchrun … -m
                                                                   megalith.dialects.megatron`
    run SCRIPT.sh [ARGUMENTS] [--override 'FLAGS']
    install DIR
    flags [--json]

A script of Megatron-LM's ends in `torchrun … ../../pretrain_gpt.py FLAGS`. Where it names a file of FILES, by whatever
path, `run` puts ours in its place, by wrappers of `torchrun`, `python` and `uv` that stand first on PATH; `install`
writes these files, a few lines each, where a script's own path finds them. PyTorch is imported when a run starts, after
all that is wrong with the flags has been told.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megalith.errors import ConfigError, MegalithError, did_you_mean, printable
from megalith.launch.parent import exit_with_launcher
from megalith.report.streams import guard_standard_streams

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MARK = "# Written by `megalith megatron install`: hands Megatron-LM's command line to Megalith."
FILES = {  # the file in Megatron-LM's checkout → the command that answers for it
    "pretrain_gpt.py": "pretrain-gpt",
    "examples/classes/pretrain_gpt.py": "pretrain-gpt",  # where newer scripts look for it
    "pretrain_bert.py": "pretrain-bert",
    "pretrain_t5.py": "pretrain-t5",
    "tools/preprocess_data.py": "preprocess",
    "tools/checkpoint/convert.py": "convert-checkpoint",
    # Without an __init__.py, so that a package of the same name which is installed goes before it.
    "megatron/bridge/convert.py": "convert",
}
OURS = ("convert",)  # commands of `megalith` itself
REACHED = "reached"  # beside the wrappers: made when one of them hands over to us
WRAPPERS = {"torchrun": "-m torch.distributed.run", "python": "", "python3": ""}
UV_VALUES = (  # options of uv and of `uv run` with a value
    "--allow-insecure-host|--cache-dir|--color|--config-file|--config-setting|-C|--default-index|--directory|--env-file|"
    "--exclude-newer|--extra|--extra-index-url|--find-links|-f|--group|--index|--index-strategy|--index-url|-i|"
    "--keyring-provider|--link-mode|--no-binary-package|--no-build-isolation-package|--no-build-package|--no-extra|"
    "--no-group|--only-group|--package|--prerelease|--project|--python|-p|--python-platform|--python-preference|"
    "--refresh-package|--reinstall-package|--resolution|--upgrade-package|-P|--with|-w|--with-editable|"
    "--with-requirements"
)


class OwnOptions(argparse.ArgumentParser):
    """The few options that Megatron's programs do not have."""

    def __init__(self, prog: str):
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of COMMANDS; without one's name `pretrain-gpt`. A MegalithError is printed as its sentence."""
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
    """The exit code of a command and its words. Raises MegalithError."""
    if not words or words[0].startswith("-"):
        return pretrain(words)
    if words[0] not in COMMANDS:
        known = did_you_mean(words[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {words[0]!r} of Megatron's{known}")
    return COMMANDS[words[0]](words[1:])


def pretrain(words: list[str], program: str = "pretrain-gpt") -> int:
    """Trains as this program of Megatron's would with these flags, or prints the run file that they mean."""
    from megalith.dialects.megatron.translate import in_flags, translate

    if {"-h", "--help"} & set(words):
        print(f"{__doc__}\n`megalith megatron flags` lists Megatron's flags and what each means here.")
        return 0
    parser = OwnOptions(program)
    parser.add_argument("--emit", metavar="FILE")
    parser.add_argument("--ignore-unknown", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--nproc", type=int)
    own, flags = parser.parse_known_args(words)
    world_size = own.nproc or int(os.environ.get("WORLD_SIZE", 0)) or None
    how = dict(ignore_unknown=own.ignore_unknown, trust=own.trust, program=program)
    result = translate(flags, world_size, **how)
    is_first = os.environ.get("RANK", "0") == "0"
    if os.environ.get(QUEUES) == "1" and not own.emit:
        del os.environ[QUEUES]
        result.notes.append(f"{QUEUES}=1 is not needed, and is taken out of the environment")
    if is_first and not (own.nproc and not own.emit):
        for note in result.notes:
            print(f"note: {printable(note)}", file=sys.stderr if own.emit else sys.stdout, flush=True)
    config = result.config()
    if own.emit:
        if own.emit == "-":
            print(result.to_yaml(), end="")
        else:
            Path(own.emit).write_text(result.to_yaml(), encoding="utf-8")
            print(f"wrote {printable(own.emit)}", file=sys.stderr)
        return 0
    if own.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        more = ["--ignore-unknown"] * own.ignore_unknown + ["--trust"] * own.trust
        with in_flags():
            return launch(
                own.nproc,
                ["-m", "megalith.dialects.megatron", program, *flags, *more],
                check=lambda world_sizes: check_job(config, world_sizes, own.nproc, True),
            )
    from megalith.launch.stops import exit_code
    from megalith.training.trainer import train

    with in_flags():
        return exit_code(train(config).ended)


def run(words: list[str]) -> int:
    """Runs a script with our files in Megatron's place."""
    parser = OwnOptions("megalith megatron run")
    parser.add_argument("--override", default="", metavar="'FLAGS'")
    own, words = parser.parse_known_args(words)
    if not words:
        raise ConfigError("megalith megatron run needs a script: megalith megatron run SCRIPT.sh [ARGUMENTS]")
    return run_script(words[0], words[1:], own.override)


def install_files(words: list[str]) -> int:
    """Writes Megatron's programs into a folder, each a few lines that call us."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(
            "megalith megatron install needs one folder: the one where scripts look for pretrain_gpt.py"
        )
    for path in install(words[0]):
        print(f"wrote {printable(path)}")
    return 0


def flags(words: list[str]) -> int:
    """Prints every flag of Megatron's with its kind and its meaning."""
    from megalith.dialects.megatron.translate import listing

    if words not in ([], ["--json"]):
        raise ConfigError(f"megalith megatron flags takes no {' '.join(words)!r}; it takes --json")
    table = listing()
    if words:
        print(json.dumps(table, indent=1, ensure_ascii=False))
        return 0
    width = max(map(len, table))
    for flag, row in table.items():
        print(f"{flag.ljust(width)}  {row['kind'].ljust(9)}  {row['means']}")
    return 0


def tool(name: str) -> Callable[[list[str]], int]:
    """A function of megatron_tools.py, imported when it is called."""

    def call(words: list[str]) -> int:
        from megalith.dialects.megatron import megatron_tools

        return getattr(megatron_tools, name)(words)

    return call


def install(folder: str | Path) -> list[Path]:
    """Writes FILES below `folder`, and returns their paths. Raises ConfigError where another file would be replaced."""
    paths = {Path(folder) / name: command for name, command in FILES.items()}
    for path in paths:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(f"{path} is there, and not ours; choose a folder without it, or move it away")
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
    """Runs a script of Megatron-LM's with bash and `arguments`, our files in the place of Megatron's; its exit code.

    `override`: flags that are put behind those that the script gives to a `pretrain_….py`, where the last one counts.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; give the path of a shell script")
    if b"\r\n" in Path(script).read_bytes():
        raise ConfigError(
            f"{script} has Windows' line ends, which bash takes for a part of each line; remove them: "
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
            print(
                f"{printable(script)} ended with exit code {code} before it started any of {', '.join(FILES)}: if it "
                "looks whether the file is there, put it there with `megalith megatron install DIR`, DIR being the "
                "folder where the script looks",
                file=sys.stderr,
            )
        return code


def _wrapper(folder: str, module: str, override: str) -> str:
    """A shell script that runs Python with its arguments, but ours for the first file that is one of FILES."""
    cases = "\n".join(
        f"      {name} | */{name}) word={shlex.quote(f'{folder}/{name}')}; found={command} ;;"
        for name, command in FILES.items()
    )
    try:
        more = shlex.join(shlex.split(override))
    except ValueError as error:
        raise ConfigError(
            f"--override {override!r} is no list of words ({error}); correct its quotes"
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
    """A shell script for `uv run [OPTIONS] COMMAND`: without uv where COMMAND names one of FILES, so that it finds the
    other wrappers on PATH; uv itself for all else."""
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
