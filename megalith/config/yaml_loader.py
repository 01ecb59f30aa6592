"""YAML loader that builds no objects from tags and rejects duplicate keys, deep nesting and alias bombs."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_NODES = 100_000  # after alias expansion; a blend of thousands of datasets has far fewer
MAX_DEPTH = 100  # of sections and lists within each other; each level takes four frames of Python's stack


def parse_yaml(text: str) -> Any:
    """Return the plain values of `text`.

    Raises:
        yaml.YAMLError: it is malformed, repeats a key, nests deeper than MAX_DEPTH or expands to more than MAX_NODES.
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


class _Loader(yaml.SafeLoader):
    """YAML loader that checks keys, nesting and alias expansion before it builds values."""

    def __init__(self, text: str):
        super().__init__(text)
        self._sizes: dict[int, int] = {}  # id of a finished node → number of nodes after alias expansion
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        is_alias = self.check_event(yaml.AliasEvent)
        if self._depth == MAX_DEPTH:
            raise ComposerError(
                None, None, f"it is nested more than {MAX_DEPTH} levels deep", self.peek_event().start_mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
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
