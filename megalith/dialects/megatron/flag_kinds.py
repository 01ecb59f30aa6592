"""What a flag of Megatron-LM can be here, and what the flags of one command line say of its run.

`takes` is what stands behind a flag: `switch` (nothing), `int`, `float`, `text` or choices with `|` between, with `*`
or `+` for a list, `{3}` for three. `default` is Megatron's own. An omitted flag means that default, not ours;
and a flag that would be refused passes where it is given its default, since it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Sets:
    """A setting of ours, through `values` where these are written otherwise."""

    takes: str
    path: str
    default: Any = None
    values: Mapping[Any, Any] | None = None
    kind: ClassVar[str] = "sets"

    @property
    def means(self) -> str:
        told = self.values and ", ".join(f"{theirs} is {ours}" for theirs, ours in self.values.items())
        return f"{self.path} ({told})" if told else self.path


@dataclass(frozen=True)
class Derives:
    """Settings that follow from several flags together."""

    takes: str
    derive: Callable[[ParsedFlags], None]
    default: Any = None
    kind: ClassVar[str] = "derives"

    @property
    def means(self) -> str:
        return " ".join(self.derive.__doc__.split())


@dataclass(frozen=True)
class NoEffect:
    """Nothing of this run depends on it, or it always is so: told in one note."""

    takes: str
    means: str
    default: Any = None
    kind: ClassVar[str] = "no effect"


@dataclass(frozen=True)
class Refused:
    """What is not had. `harmless`: without it the training is the same, so `--ignore-unknown` passes over it."""

    takes: str
    means: str
    default: Any = None
    harmless: bool = False
    kind: ClassVar[str] = "refused"


Flag = Sets | Derives | NoEffect | Refused


@dataclass
class ParsedFlags:
    """The flags of a command line, read: `flags["--lr"]` is its value, or Megatron's default where it was omitted."""

    table: Mapping[str, Flag]
    program: str = "pretrain-gpt"
    """The command that they were given to."""
    values: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """Processes of the job, where they are known."""
    misread: set[str] = field(default_factory=set)
    """Flags that were meant, as far as can be seen, but could not be read."""
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
