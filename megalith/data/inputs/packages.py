"""Import of optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType

from megalith.errors import ConfigError, install_line


def import_package(module: str, purpose: str, extra: str = "datasets") -> ModuleType:
    """Import `module`. Errors quote `purpose`, which needs the package.

    Args:
        module: dotted name, such as `pyarrow.parquet`.
        purpose: subject of the error's sentence, such as a file's name.
        extra: the extra of this package that installs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the {module.partition('.')[0]} package, which is not installed ({error}); run: "
            f"{install_line(extra)}"
        ) from error
