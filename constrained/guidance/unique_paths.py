"""Where in a JSON value the arrays and objects are that must not repeat an item or a name, by a rewritten schema.

A schema is followed along all of its alternatives, so an array or object counts as such if any of them says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

Nodes: TypeAlias = tuple[int, ...]
"""The subschemas that may apply to a value, as indices into `UniquePaths.nodes`."""

UNIQUE_NAMES = "uniqueNames"  # says that an object repeats no name, in what `separate_unique_items` returns
_PREFIX = "#/$defs/"


class UniquePaths:
    """Follows what `separate_unique_items` returned.

    >>> paths = UniquePaths({"properties": {"a": {"uniqueItems": True}}})
    >>> paths.says(paths.start, "uniqueItems"), paths.says(paths.property(paths.start, "a"), "uniqueItems")
    (False, True)
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._nodes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a part of a schema, and its definitions
        self._indices: dict[int, int] = {}
        self.start = self.add(schema)
        self.property = lru_cache(maxsize=4096)(self._property)
        self.item = lru_cache(maxsize=4096)(self._item)

    def add(self, schema: dict[str, Any]) -> Nodes:
        """Returns the nodes of a value of one more schema, which has definitions of its own."""
        return self._nodes_of([schema], schema.get("$defs", {}))

    def says(self, nodes: Nodes, keyword: str) -> bool:
        """Returns whether one of the nodes has `uniqueItems` or UNIQUE_NAMES."""
        return any(keyword in self._nodes[index][0] for index in nodes)

    def _property(self, nodes: Nodes, name: str) -> Nodes:
        found: list[dict[str, Any]] = []
        for part, _ in (self._nodes[index] for index in nodes):
            found += part.get("patternProperties", {}).values()  # whether or not it matches
            if name in part.get("properties", {}):
                found.append(part["properties"][name])
            elif "additionalProperties" in part:
                found.append(part["additionalProperties"])
        return self._nodes_of(found, self._nodes[nodes[0]][1]) if nodes else ()

    def _item(self, nodes: Nodes, index: int) -> Nodes:
        found: list[dict[str, Any]] = []
        for part, _ in (self._nodes[at] for at in nodes):
            listed = part.get("prefixItems", [])
            if index < len(listed):
                found.append(listed[index])
            elif "items" in part:
                found.append(part["items"])
        return self._nodes_of(found, self._nodes[nodes[0]][1]) if nodes else ()

    def _nodes_of(self, schemas: list[dict[str, Any]], definitions: dict[str, Any]) -> Nodes:
        """Returns the nodes of the schemas, of all that apply to the same value, and of no empty ones."""
        found: dict[int, None] = {}
        todo = list(schemas)
        while todo:
            part = todo.pop()
            if not part or self._index(part, definitions) in found:
                continue
            found[self._index(part, definitions)] = None
            todo += [*part.get("allOf", ()), *part.get("anyOf", ())]
            if "$ref" in part:
                todo.append(definitions[part["$ref"].removeprefix(_PREFIX)])
        return tuple(sorted(found))

    def _index(self, part: dict[str, Any], definitions: dict[str, Any]) -> int:
        index = self._indices.get(id(part))
        if index is None:
            index = self._indices[id(part)] = len(self._nodes)
            self._nodes.append((part, definitions))
        return index
