"""Replaces dynamic references whose target depends on the path that leads to them, by copies of resources.

The target of a dynamic reference is found in the outermost resource of the dynamic scope with the same anchor, and a
resource is entered through references only. So what matters of a scope is, for each anchor, the first resource with it.
Each resource is copied once for each scope in which it is entered; in a copy every reference has one target.

    root -> list -> $dynamicRef "#item" -> item of the root        $defs/0 = list, entered from the root
    list ->         $dynamicRef "#item" -> item of the list        $defs/1 = list, entered by itself
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urldefrag

from plait.constrained.json_schema.rewrite.references.resources import DEFINITIONS, Resources, join_reference
from plait.constrained.specs import GrammarError

MAX_COPIES = 64
_RECURSIVE = "$recursiveAnchor"
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
Scope: TypeAlias = tuple[tuple[str, str], ...]
"""(dynamic anchor, pointer of the first resource with it), sorted."""


def has_dynamic_references(parts: Iterable[tuple[str, dict[str, Any]]]) -> bool:
    """Returns whether one of `parts`, (pointer, subschema), has a dynamic reference."""
    return any(isinstance(part.get(name), str) for _, part in parts for name in _REFERENCES[1:])


class StaticCopier:
    """Makes an equivalent document of `schema` without dynamic references, whose references are pointers from its root.

    `parts`: (pointer, subschema) of `schema`, outer ones first. References to nothing stay. `given`: as in
    `resolve_references`.

    >>> schema = {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}
    >>> StaticCopier(schema, [("", schema), ("/items", schema["items"])], 2020, {}).copy_root()
    {'items': {'allOf': [{'$ref': '#'}]}}
    """

    def __init__(
        self, schema: dict[str, Any], parts: list[tuple[str, dict[str, Any]]], draft: int, given: dict[str, str]
    ) -> None:
        self._schema = schema
        self._known = Resources(draft, given=given)
        self._bases = {at: base for at, _, base in self._known.add(parts)}
        self._places = {pointer: uri for uri, pointer in self._known.pointers.items()} | {"": self._bases[""]}
        self._anchors = self._dynamic_anchors(parts)
        self._numbers: dict[tuple[str, Scope], int] = {}  # of the copies, by the resource's pointer and the scope
        self._todo: list[tuple[str, Scope]] = []

    def _dynamic_anchors(self, parts: list[tuple[str, dict[str, Any]]]) -> dict[str, list[str]]:
        """Returns the dynamic anchors of each resource, by its pointer."""
        found: dict[str, list[str]] = {}
        for at, part in parts:
            resource = self._resource_of(at)
            if isinstance(part.get("$dynamicAnchor"), str):
                found.setdefault(resource, []).append(part["$dynamicAnchor"])
            if part.get(_RECURSIVE) is True and resource == at:
                found.setdefault(resource, []).append(_RECURSIVE)
        return found

    def _resource_of(self, pointer: str) -> str:
        """Returns the pointer of the innermost resource that contains a place."""
        while pointer not in self._places:
            pointer = pointer.rpartition("/")[0]
        return pointer

    def copy_root(self) -> Any:
        """Returns the document. Raises GrammarError if too many copies are needed."""
        scope = self._entered("", ())
        self._numbers["", scope] = -1
        root = self._copy(self._schema, "", "", scope)
        copies = {}
        while self._todo:
            at, inner_scope = self._todo.pop()
            name = str(self._numbers[at, inner_scope])
            copies[name] = self._copy(self._value_at(at), at, at, inner_scope)
        if copies:
            root[DEFINITIONS] = {**copies, **root.get(DEFINITIONS, {})}
        return root

    def _value_at(self, pointer: str) -> Any:
        value: Any = self._schema
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value

    def _entered(self, resource: str, scope: Scope) -> Scope:
        """Returns the scope within a resource that is entered in `scope`."""
        known = dict(scope)
        return tuple(sorted({**dict.fromkeys(self._anchors.get(resource, ()), resource), **known}.items()))

    def _copy(self, value: Any, at: str, resource: str, scope: Scope) -> Any:
        if isinstance(value, list):
            return [self._copy(inner, f"{at}/{index}", resource, scope) for index, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if at in self._places and at != resource:
            return {"$ref": self._reference(at, scope)}
        copied = {}
        for name, inner in value.items():
            place = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
            is_definition = at.rpartition("/")[2] in (DEFINITIONS, "definitions") and place in self._places
            if not is_definition:
                copied[name] = self._copy(inner, place, resource, scope)
        return self._with_references(copied, self._bases[at], scope) if at in self._bases else copied

    def _with_references(self, part: dict[str, Any], base: str, scope: Scope) -> dict[str, Any]:
        for keyword in _REFERENCES:
            target = self._target(part[keyword], keyword, base, scope) if isinstance(part.get(keyword), str) else None
            if target is None:
                continue
            if keyword == "$ref":
                part["$ref"] = self._reference(target, scope)
            else:
                del part[keyword]
                part["allOf"] = [*part.get("allOf", []), {"$ref": self._reference(target, scope)}]
        for name in _NAMES:
            if isinstance(part.get(name), str | bool):
                del part[name]
        return part

    def _target(self, reference: str, keyword: str, base: str, scope: Scope) -> str | None:
        """Returns the pointer of what a reference refers to; None if it refers to nothing in the document."""
        address, fragment = urldefrag(join_reference(base, reference))
        fragment = unquote(fragment)
        resource = self._known.pointers.get(address)
        if resource is None:
            return None
        anchor = _RECURSIVE if keyword == "$recursiveRef" else fragment
        if keyword != "$ref" and anchor in self._anchors.get(resource, ()):
            resource = dict(scope).get(anchor, resource)
            address = self._places[resource]
        if fragment and not fragment.startswith("/"):
            return self._known.anchors.get(f"{address}#{fragment}")
        return resource + fragment

    def _reference(self, target: str, scope: Scope) -> str:
        """Returns a reference to the copy, in the scope after entering it, of what is at the pointer `target`."""
        resource = self._resource_of(target)
        key = resource, self._entered(resource, scope)
        if key not in self._numbers:
            if len(self._numbers) > MAX_COPIES:
                raise GrammarError("its dynamic references have too many different targets", target)
            self._numbers[key] = len(self._numbers)
            self._todo.append(key)
        number = self._numbers[key]
        start = "" if number < 0 else f"/{DEFINITIONS}/{number}"
        return f"#{quote(start + target[len(resource) :], safe=_SAFE)}"


_SAFE = "/~!$&'()*+,;=:@?"
