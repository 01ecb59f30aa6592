"""Loads extensions: built-in ones by name, and users' own as `path.py:object`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.errors import ConfigError, nearest_of


def load_extension(value: str, built_in: Mapping[str, str], setting: str) -> Any:
    """Return the object that an extension setting names: a built-in one, or one in the user's file.

    Args:
        value: a name in `built_in`, or `path.py:object`.
        built_in: name → "module:object", a table of config/extensions.py.
        setting: the setting that has the value, for errors.

    Raises:
        ConfigError: if the name is unknown, or the file cannot be imported or lacks the object.
    """
    if value in built_in:
        module, _, name = built_in[value].partition(":")
        return getattr(importlib.import_module(module), name)
    path, colon, name = value.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{setting} has {value!r}, which is not a built-in name{nearest_of(value, built_in)}; use a built-in name "
            "or path.py:function"
        )
    if not Path(path).is_file():
        raise ConfigError(f"{setting} has {value!r}, but there is no file {path}; correct the path")
    spec = importlib.util.spec_from_file_location(f"{setting.replace('.', '_')}_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{setting} has {value!r}, but importing it raised {type(error).__name__}: {error}; correct the file"
        ) from error
    extension = getattr(module, name, None)
    if not callable(extension):
        raise ConfigError(f"{setting} has {value!r}, but {path} has no function {name}; correct the name")
    return extension
