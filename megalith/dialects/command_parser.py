"""Command lines of other systems' entry points."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megalith.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Parser of the options that another system's program does not have. Errors raise ConfigError."""

    def __init__(self, prog: str):
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")
