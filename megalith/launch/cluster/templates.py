"""Job file templates (templates/*.j2) and the filters that quote values in them."""

from __future__ import annotations

import functools
import json
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Render a template from the folder `templates`."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("megalith.launch.cluster"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"yaml": yaml_scalar, "quote": shlex.quote}
    return environment


def yaml_scalar(value: Any) -> str:
    """Write a string, number or list in YAML's flow style. Strings are quoted, all but printable ASCII escaped."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_scalar, value))}]"
    if isinstance(value, str):
        return (
            '"'
            + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
            + '"'
        )
    return json.dumps(value)
