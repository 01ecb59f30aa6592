"""YAML loader that builds no objects from tags and rejects duplicate keys and excessive alias expansion."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_NODES = 100_000  # after alias expansion; a blend of thousands of datasets has far fewer


def parse_yaml(text: str) -> Any:
    """Return the plain values of `text`. Raises yaml.YAMLError, or RecursionError for excessive nesting."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and excessive alias expansion before building values."""

    def __init__(self, text: str):
        super().__init__(text)
        self._sizes: dict[int, int] = {}  # id of a finished node → number of nodes after alias expansion

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias:
            if id(node) not in self._sizes:
                raise ComposerError(None, None, "an alias refers to a node that contains it", node.start_mark)
            return node
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _reject_duplicate_keys([key for key, _ in node.value])
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        size = 1 + sum(self._sizes[id(child)] for child in children)
        if size > MAX_NODES:
            raise ComposerError(
                None, None, f"it has more than {MAX_NODES} values after alias expansion", node.start_mark
            )
        self._sizes[id(node)] = size
        return node


def _reject_duplicate_keys(keys: list[yaml.Node]) -> None:
    seen = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            raise ComposerError(None, None, f"the key {key.value!r} appears twice", key.start_mark)
        seen.add(key.value)
