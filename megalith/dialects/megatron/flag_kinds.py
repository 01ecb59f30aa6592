"""Kinds of Megatron-LM flags, and the parsed flags of one command line.

`takes` is the kind of value: `switch` (none), `int`, `float`, `text`, or choices separated by `|`; with `*` or `+` for
a list and `{3}` for three values. `default` is Megatron's default, which an omitted flag has here too. A refused flag
is accepted with its default, because it has no effect then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Sets:
    """A flag that sets one setting. `values` maps values of the flag to values of the setting."""

    takes: str
    path: str
    default: Any = None
    values: Mapping[Any, Any] | None = None
    kind: ClassVar[str] = "sets"

    @property
    def means(self) -> str:
        mapping = self.values and ", ".join(f"{flag} is {ours}" for flag, ours in self.values.items())
        return f"{self.path} ({mapping})" if mapping else self.path


@dataclass(frozen=True)
class Derives:
    """A flag that determines settings together with other flags."""

    takes: str
    derive: Callable[[ParsedFlags], None]
    default: Any = None
    kind: ClassVar[str] = "derives"

    @property
    def means(self) -> str:
        return " ".join(self.derive.__doc__.split())


@dataclass(frozen=True)
class NoEffect:
    """A flag without effect in Megalith. One note lists all of them."""

    takes: str
    means: str
    default: Any = None
    kind: ClassVar[str] = "no effect"


@dataclass(frozen=True)
class Refused:
    """An unsupported flag. `harmless`: it does not affect training, so `--ignore-unknown` ignores it."""

    takes: str
    means: str
    default: Any = None
    harmless: bool = False
    kind: ClassVar[str] = "refused"


Flag = Sets | Derives | NoEffect | Refused


@dataclass
class ParsedFlags:
    """Parsed flags of a command line: `flags["--lr"]` is the value, or Megatron's default if the flag was omitted."""

    table: Mapping[str, Flag]
    program: str = "pretrain-gpt"
    """Command that the flags belong to."""
    values: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """Number of processes of the job, if known."""
    misread: set[str] = field(default_factory=set)
    """Flags that are probably on the command line but could not be parsed."""
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __getitem__(self, flag: str) -> Any:
        row = self.table[flag]
        return self.values.get(flag, False if row.takes == "switch" else row.default)

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def set(self, path: str, value: Any) -> None:
        section, _, name = path.partition(".")
        self.tree.setdefault(section, {})[name] = value
