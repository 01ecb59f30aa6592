"""`megalith accelerate launch|config|enable|disable`: Accelerate's own commands with Megalith behind its plugin.

    launch ARGS script.py …    Accelerate's own parser; as `accelerate launch ARGS -m megalith.accelerate script.py …`
    config [--config_file F]   the questions of Accelerate's guide, from a terminal or a pipe, and the file they make
    enable | disable           for plain `accelerate launch script.py`: a file beside the installed packages, which acts
                               in that launcher and in the processes that it starts, where they import accelerate

A configuration file's or `--use_megatron_lm`'s choice of Megatron goes before `--multi_gpu`, which in Accelerate hides
it. PyTorch is imported when it is needed.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megalith.errors import ConfigError, MegalithError, nearest_of
from megalith.small_files import read_bounded

HOOK = "megalith_accelerate.pth"
_HOOKED = """
words = [word.rpartition('/')[2] for word in sys.orig_argv[1:]]
program = next((at for at, word in enumerate(words) if word[:1] != '-'), len(words))
try:
    if words[program : program + 1] in (['accelerate-launch'], ['accelerate.commands.launch']) or words[
        program : program + 2
    ] in (['accelerate', 'launch'], ['accelerate.commands.accelerate_cli', 'launch']):
        from megalith.dialects.accelerate.launch_door import act_in_launcher
        act_in_launcher()
    elif os.environ.get('ACCELERATE_USE_MEGATRON_LM', '').lower() == 'true' and 'RANK' in os.environ:
        from megalith.accelerate import patch
        patch()
    elif 'ACCELERATE_MIXED_PRECISION' in os.environ:
        from megalith.dialects.accelerate.launch_door import patch_on_import
        patch_on_import()
except Exception as error:
    print(f'megalith accelerate enable has no effect: {error}', file=sys.stderr)
"""
_CONCERNED = (
    "'ACCELERATE_USE_MEGATRON_LM' in os.environ or 'ACCELERATE_MIXED_PRECISION' in os.environ or "
    "any('accelerate' in word for word in sys.orig_argv[:6])"
)
LINE = f"import os, sys; ({_CONCERNED}) and exec({_HOOKED!r}, {{'os': os, 'sys': sys}})\n"  # a .pth has single lines
MODULE = "megalith.accelerate"


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command and its words. Raises MegalithError."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(
            f"there is no command `megalith accelerate {words[0]}`{nearest_of(words[0], COMMANDS)}"
        )
    return COMMANDS[words[0]](list(words[1:]))


def launch(words: list[str]) -> int:
    """Starts a script by Accelerate's launcher, with our classes in the place of Accelerate's in its processes."""
    from accelerate.commands import launch as theirs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = theirs.launch_command_parser().parse_args(words)
    if args.no_python:
        raise ConfigError(
            "--no_python starts a program that is no Python script; megalith accelerate launch needs one"
        )
    if not args.module and not Path(args.training_script).exists():
        raise ConfigError(f"there is no script {args.training_script}; give the path of a Python script")
    args.training_script_args = [
        *(["-m"] if args.module else []),
        args.training_script,
        *args.training_script_args,
    ]
    args.training_script, args.module = MODULE, True
    choose_megatron(args)
    if note := _one_process_note(args):
        print(note, file=sys.stderr)
    try:
        theirs.launch_command(args)
    except subprocess.CalledProcessError as error:  # of a single process, which has said why
        return error.returncode
    except ChildFailedError as error:  # of several, each named in it
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except ValueError as error:  # of its check of the options
        raise ConfigError(f"Accelerate's launcher: {error}") from None
    return 0


def _one_process_note(args: Any) -> str:
    """What `--num_processes` above 1 needs where Accelerate's launcher passes over it: no GPUs, and no type named."""
    import torch

    types = (args.multi_gpu, args.use_megatron_lm, args.use_deepspeed, args.use_fsdp, args.tpu, args.cpu)
    count = args.num_processes or 1
    if count < 2 or any(types) or torch.accelerator.is_available() or "distributed_type" in _file_of(args):
        return ""
    return (
        f"note: without GPUs Accelerate's launcher starts one process, whatever --num_processes says; for {count} "
        "give --multi_gpu or --use_megatron_lm too"
    )


def act_in_launcher() -> None:
    """Corrects what Accelerate's launcher, which this process is about to run, reads of its command line."""
    theirs = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *words: Any, **options: Any) -> Any:
        args = theirs(parser, *words, **options)
        if hasattr(args, "use_megatron_lm") and hasattr(args, "training_script"):
            argparse.ArgumentParser.parse_args = theirs  # type: ignore[method-assign]
            try:
                choose_megatron(args)
            except MegalithError as error:
                parser.error(str(error))
        return args

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds accelerate once, and patches it when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "accelerate":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from megalith.dialects.accelerate.patch import patch  # which imports accelerate

            patch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def patch_on_import() -> None:
    """Put our classes in the place of Accelerate's where this process imports them: a script's own plugin is enough to
    train by Megalith, and a process that never imports accelerate loads nothing."""
    sys.meta_path.insert(0, _PatchingFinder())


def choose_megatron(args: Any) -> None:
    """Lets a configuration file's MEGATRON_LM go before `--multi_gpu`, and hands on the plugin's fields of the file.

    `args` is what Accelerate's parser made; a type that it names besides `--multi_gpu` stays. Raises ConfigError.
    """
    asked = _file_of(args)
    if asked.get("distributed_type") == "MEGATRON_LM" and not (
        args.use_deepspeed or args.use_fsdp or args.tpu or args.cpu
    ):
        args.use_megatron_lm, args.multi_gpu = True, False
    if args.use_megatron_lm:
        os.environ.update({k: v for k, v in _environment(asked).items() if k not in os.environ})


def _file_of(args: Any) -> dict[str, Any]:
    """The configuration file that the launcher will read; empty where there is none."""
    import yaml
    from accelerate.commands.config.config_args import default_config_file

    if args.cpu and not args.config_file:
        return {}
    file = Path(args.config_file or default_config_file)
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(read_bounded(file))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(
            f"Accelerate's configuration file {file} cannot be read: {reason}; write it anew with `accelerate config`"
        ) from None
    return content if isinstance(content, dict) else {}


def _environment(asked: dict[str, Any]) -> dict[str, str]:
    """What the file says of the plugin: Accelerate's launcher hands on a part of its fields."""
    from megalith.dialects.accelerate.plugin import environment_of

    section = asked.get("megatron_lm_config") or {}
    return environment_of(section)


def run_script(words: Sequence[str]) -> int:
    """Runs a script, or `-m` a module, of this process with our classes in the place of Accelerate's."""
    if not words or words == ["-m"]:
        raise ConfigError(
            "python -m megalith.accelerate needs a script: python -m megalith.accelerate SCRIPT.py …"
        )
    from megalith.dialects.accelerate.patch import patch

    patch()
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def enable(words: list[str]) -> int:
    """Lets plain `accelerate launch script.py` use Megalith wherever it asks for Megatron."""
    file = _hook(words)
    file.write_text(LINE, encoding="utf-8")
    print(f"wrote {file}; `megalith accelerate disable` removes it")
    return 0


def disable(words: list[str]) -> int:
    """Undoes `enable`."""
    file = _hook(words)
    print(f"removed {file}" if file.exists() else f"{file} is not there")
    file.unlink(missing_ok=True)
    return 0


def _hook(words: list[str]) -> Path:
    if words:
        raise ConfigError(f"megalith accelerate enable and disable take no {' '.join(words)!r}")
    return Path(sysconfig.get_path("purelib")) / HOOK


def config(words: list[str]) -> int:
    """Asks the questions and writes the file."""
    from megalith.dialects.accelerate.config_wizard import run_wizard

    return run_wizard(words)


COMMANDS = {"launch": launch, "config": config, "enable": enable, "disable": disable}
