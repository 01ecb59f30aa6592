"""`megalith accelerate launch|config|enable|disable`: Accelerate's commands on Megalith.

    launch ARGS script.py …    same as `accelerate launch ARGS -m megalith.accelerate script.py …`
    config [--config_file F]   ask the questions of Accelerate's guide and write a configuration file
    enable | disable           make plain `accelerate launch script.py` use Megalith, or undo that: a .pth file next to
                               the installed packages acts in the launcher and in the processes that it starts

Megatron-LM, selected by a configuration file or by `--use_megatron_lm`, takes precedence over `--multi_gpu`; in
Accelerate it does not. PyTorch is imported only when needed.
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
_IS_ACCELERATE = (
    "'ACCELERATE_USE_MEGATRON_LM' in os.environ or 'ACCELERATE_MIXED_PRECISION' in os.environ or "
    "any('accelerate' in word for word in sys.orig_argv[:6])"
)
# A .pth file executes single lines.
LINE = f"import os, sys; ({_IS_ACCELERATE}) and exec({_HOOKED!r}, {{'os': os, 'sys': sys}})\n"
MODULE = "megalith.accelerate"


def run_command(words: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises MegalithError."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(f"unknown command `megalith accelerate {words[0]}`{nearest_of(words[0], COMMANDS)}")
    return COMMANDS[words[0]](list(words[1:]))


def launch(words: list[str]) -> int:
    """Launch a script with `accelerate launch`, replacing Accelerate's classes by Megalith's in each process.

    Args:
        words: command-line arguments of `accelerate launch`.
    """
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = accelerate_launch.launch_command_parser().parse_args(words)
    if args.no_python:
        raise ConfigError(
            "--no_python starts programs other than Python scripts, but megalith accelerate launch runs only Python "
            "scripts; leave --no_python out, and name a script"
        )
    if not args.module and not Path(args.training_script).exists():
        raise ConfigError(f"there is no script {args.training_script}; pass the path of a Python script")
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
        accelerate_launch.launch_command(args)
    except subprocess.CalledProcessError as error:  # one process, which has printed its error
        return error.returncode
    except ChildFailedError as error:  # several processes, named in the error
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except ValueError as error:  # Accelerate's check of its options
        raise ConfigError(f"Accelerate's launcher: {error}") from None
    return 0


def _one_process_note(args: Any) -> str:
    """Return a note if Accelerate's launcher ignores --num_processes: no GPUs and no distributed type."""
    import torch

    types = (args.multi_gpu, args.use_megatron_lm, args.use_deepspeed, args.use_fsdp, args.tpu, args.cpu)
    count = args.num_processes or 1
    if count < 2 or any(types) or torch.accelerator.is_available() or "distributed_type" in _file_of(args):
        return ""
    return (
        f"note: without GPUs Accelerate's launcher starts one process and ignores --num_processes; for {count} "
        "processes also set --multi_gpu or --use_megatron_lm"
    )


def act_in_launcher() -> None:
    """Patch argparse so that Accelerate's launcher, about to run in this process, selects Megatron-LM as configured."""
    accelerate_launch = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *words: Any, **options: Any) -> Any:
        args = accelerate_launch(parser, *words, **options)
        if hasattr(args, "use_megatron_lm") and hasattr(args, "training_script"):
            argparse.ArgumentParser.parse_args = accelerate_launch  # type: ignore[method-assign]
            try:
                choose_megatron(args)
            except MegalithError as error:
                parser.error(str(error))
        return args

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Import hook that patches accelerate after its first import."""

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
            from megalith.dialects.accelerate.patch import patch  # imports accelerate

            patch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def patch_on_import() -> None:
    """Patch accelerate when this process imports it.

    A script that creates a MegatronLMPlugin then trains with Megalith; a process that never imports accelerate loads
    nothing.
    """
    sys.meta_path.insert(0, _PatchingFinder())


def choose_megatron(args: Any) -> None:
    """Select Megatron-LM if the configuration file does, and export the plugin's fields as environment variables.

    The file takes precedence over `--multi_gpu`, but not over other distributed types on the command line. Raises
    ConfigError.

    Args:
        args: namespace from Accelerate's parser; changed in place.
    """
    file_config = _file_of(args)
    if file_config.get("distributed_type") == "MEGATRON_LM" and not (
        args.use_deepspeed or args.use_fsdp or args.tpu or args.cpu
    ):
        args.use_megatron_lm, args.multi_gpu = True, False
    if args.use_megatron_lm:
        os.environ.update({k: v for k, v in _environment(file_config).items() if k not in os.environ})


def _file_of(args: Any) -> dict[str, Any]:
    """Return the content of the launcher's configuration file, or an empty mapping if there is none."""
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
            f"Accelerate's configuration file {file} cannot be read: {reason}; rewrite it with `accelerate config`"
        ) from None
    return content if isinstance(content, dict) else {}


def _environment(file_config: dict[str, Any]) -> dict[str, str]:
    """Return the file's plugin fields as environment variables. Accelerate's launcher exports only some of them."""
    from megalith.dialects.accelerate.plugin import environment_of

    return environment_of(file_config.get("megatron_lm_config") or {})


def run_script(words: Sequence[str]) -> int:
    """Run a script, or with `-m` a module, in this process, with Megalith's classes in place of Accelerate's."""
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
    """Make plain `accelerate launch script.py` use Megalith for Megatron-LM."""
    file = _hook(words)
    file.write_text(LINE, encoding="utf-8")
    print(f"wrote {file}; `megalith accelerate disable` removes it")
    return 0


def disable(words: list[str]) -> int:
    """Undo `enable`."""
    file = _hook(words)
    print(f"removed {file}" if file.exists() else f"{file} does not exist")
    file.unlink(missing_ok=True)
    return 0


def _hook(words: list[str]) -> Path:
    if words:
        raise ConfigError(
            f"megalith accelerate enable and disable have no arguments, but got {' '.join(words)!r}; leave them out"
        )
    return Path(sysconfig.get_path("purelib")) / HOOK


def config(words: list[str]) -> int:
    """Ask the questions of `accelerate config`, and write the configuration file."""
    from megalith.dialects.accelerate.config_wizard import run_wizard

    return run_wizard(words)


COMMANDS = {"launch": launch, "config": config, "enable": enable, "disable": disable}
