"""YAML loader that builds no objects from tags, accepts no key twice and expands no alias without end."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MOST_NODES = 100_000  # with every alias written out; a blend of thousands of datasets stays far below


def parse_yaml(text: str) -> Any:
    """Return the plain values of `text`. Raises yaml.YAMLError, or RecursionError for excessive nesting."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and excessive alias expansion before building values."""

    def __init__(self, text: str):
        super().__init__(text)
        self._sizes: dict[int, int] = {}  # id of a finished node → its nodes, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        named_before = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if named_before:
            if id(node) not in self._sizes:
                raise ComposerError(None, None, "an alias stands inside what it names", node.start_mark)
            return node
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _refuse_twins([key for key, _ in node.value])
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        size = 1 + sum(self._sizes[id(child)] for child in children)
        if size > MOST_NODES:
            raise ComposerError(
                None, None, f"it has more than {MOST_NODES} values, aliases written out", node.start_mark
            )
        self._sizes[id(node)] = size
        return node


def _refuse_twins(keys: list[yaml.Node]) -> None:
    seen = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            raise ComposerError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
        seen.add(key.value)
