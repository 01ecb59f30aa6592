"""Argument parsers whose errors are ConfigErrors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megalith.errors import ConfigError, did_you_mean

Arguments = argparse.Namespace


class Parser(argparse.ArgumentParser):
    """Parser of a command or a group. Errors raise ConfigError. A group without arguments prints its help."""

    commands: Any = None
    """argparse's subparsers action, for a group."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.set_defaults(parser=self, takes_settings=False)

    def add_subparsers(self, **options: Any) -> Any:
        self.commands = super().add_subparsers(**options)
        return self.commands

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument as in argparse, with the default at the end of its help."""
        default, text = options.get("default"), options.get("help") or ""
        if default not in (None, argparse.SUPPRESS) and "(default" not in text:
            options["help"] = f"{text} (default: %(default)s)".lstrip()
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.commands is not None:
            if not args:
                self.print_help()
                self.exit()
            choices = self.commands.choices
            if args[0] not in choices and not args[0].startswith("-"):
                hint = did_you_mean(args[0], choices) or f"; `{self.prog} --help` lists them all"
                raise ConfigError(f"unknown command `{self.prog} {args[0]}`{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise ConfigError for unknown arguments, suggesting the nearest known one."""
        options = set(re.findall(r"--[a-z][-a-z0-9]*", self.format_help()))
        hint = did_you_mean(words[0].partition("=")[0], options) or f"; see `{self.prog} --help`"
        raise ConfigError(f"`{self.prog}` takes no {' '.join(words)!r}{hint}")


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """Return all spellings of a parser's options."""
    return [option for action in parser._actions for option in action.option_strings]
