"""A YAML document that remembers where each value stands.

The node tree that PyYAML composes is kept, so a position is looked up only when an error needs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from preft_cli.config import scalars

KeyPath = tuple[str | int, ...]
Position = tuple[int, int]
"""Line and column, both counted from 1."""

_MERGE = "tag:yaml.org,2002:merge"
_DEFAULT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


class Composer(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer):
    """PyYAML's reader up to the node tree. Scalars are resolved by `scalars`, not by YAML 1.1's rules."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """The tag of a node without one. Plain scalars get the empty tag: their text decides."""
        if kind is yaml.ScalarNode:
            if implicit[0]:
                return _MERGE if value == "<<" else ""
            return _DEFAULT_TAGS[0]
        return _DEFAULT_TAGS[1] if kind is yaml.SequenceNode else _DEFAULT_TAGS[2]

    def descend_resolver(self, *_: Any) -> None:
        """Needed by `compose`; there are no path resolvers here."""

    def ascend_resolver(self) -> None:
        """See `descend_resolver`."""


class BadNode(Exception):
    """A node that has no place in a config file."""

    def __init__(self, node: yaml.Node, text: str) -> None:
        super().__init__(text)
        self.position = position_of(node)


def position_of(node: yaml.Node) -> Position:
    """Where a node starts."""
    return node.start_mark.line + 1, node.start_mark.column + 1


@dataclass
class Document:
    """The node tree, its plain data, and the duplicate keys found on the way."""

    root: yaml.Node

    def __post_init__(self) -> None:
        self.duplicates: list[tuple[str, Position, Position]] = []
        """Each key written twice in one mapping: its name, where it is repeated, where it stood first."""
        self._built: dict[int, Any] = {}
        self._open: set[int] = set()
        self.data = self._build(self.root)

    def position(self, path: KeyPath, *, of_key: bool = False) -> Position | None:
        """Where the value at `path` stands, or its key; None if the document has no such path."""
        node, key = self.root, self.root
        for part in path:
            if isinstance(node, yaml.MappingNode):
                found = {name: (key_node, value) for name, key_node, value in self._items(node)}.get(str(part))
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = (node.value[part], node.value[part])
            else:
                return None
            if found is None:
                return None
            key, node = found
        return position_of(key if of_key else node)

    def _build(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _DEFAULT_TAGS:
            raise BadNode(node, f"the tag {node.tag} has no meaning in a config file")
        if id(node) in self._open:
            raise BadNode(node, "an anchor that contains itself")
        if id(node) not in self._built:  # an alias shares its anchor's value, so that aliases cannot blow up
            self._open.add(id(node))
            self._built[id(node)] = self._collection(node)
            self._open.remove(id(node))
        return self._built[id(node)]

    def _collection(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item) for item in node.value]
        self._find_duplicates(node)
        return {name: self._build(value) for name, _, value in self._items(node)}

    @staticmethod
    def _scalar(node: yaml.ScalarNode) -> scalars.Scalar:
        try:
            return scalars.tagged(node.tag, node.value) if node.tag else scalars.plain(node.value)
        except ValueError as problem:
            raise BadNode(node, str(problem)) from None

    def _find_duplicates(self, node: yaml.Node) -> None:
        seen: dict[str, Position] = {}
        for key, _ in node.value:
            name = _key_name(key)
            if name in seen and key.tag != _MERGE:
                self.duplicates.append((name, position_of(key), seen[name]))
            seen.setdefault(name, position_of(key))

    def _items(self, node: yaml.Node, depth: int = 0) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Name, key and value of a mapping's entries; merged ones (`<<: *anchor`) first, so that its own keys win."""
        if depth > 20:
            raise BadNode(node, "merge keys (<<) that are nested too deeply")
        for key, value in node.value:
            if key.tag == _MERGE:
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):  # the first of several sources wins
                    if not isinstance(source, yaml.MappingNode):
                        raise BadNode(source, "<< merges a mapping or a list of mappings, and this is neither")
                    yield from self._items(source, depth + 1)
        yield from ((_key_name(key), key, value) for key, value in node.value if key.tag != _MERGE)


def _key_name(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):
        raise BadNode(key, "a list or mapping as a key; keys are names")
    return str(key.value)
