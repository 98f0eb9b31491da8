"""Rewrites the references of a document, also by `$id` and anchor and dynamic ones, to JSON pointers from its root.

A document may contain schemas with an `$id`, which are resources: the base of the references below them. Nothing is
fetched; a reference to another document stays as it is, and is refused where it is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urldefrag, urljoin

ROOT = "http://root.invalid/"  # the URI under which a subschema's validator finds the document
Part: TypeAlias = tuple[str, dict[str, Any], str]
"""The pointer of a subschema, the subschema, and the URI of the resource that it belongs to."""


def resolve_references(parts: list[tuple[str, dict[str, Any]]], draft: int) -> set[str]:
    """Rewrites the references in `parts`, (pointer, subschema) outer ones first, and removes their ids and anchors.

    Proof for dynamic references: the target is the outermost schema of the dynamic scope with the same dynamic anchor.
    If only one schema of the document has it, it is that one. Others stay, and are refused.

    Returns the URIs of the root.

    >>> part = {"$id": "http://a.b/c", "items": {"$ref": "c#/x"}}
    >>> sorted(resolve_references([("", part), ("/items", part["items"])], 2020)), part["items"]
    (['http://a.b/c', 'http://root.invalid/'], {'$ref': 'http://root.invalid/#/x'})
    """
    known = _Resources(draft)
    based = list(known.add(parts))
    for _, part, base in based:
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(part.get(keyword), str):
                known.rewrite(part, keyword, base)
    if len(set(known.pointers.values())) > 1 or known.anchors:
        for at, part, _ in based:
            for keyword in ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor") if at else ():
                part.pop(keyword, None)
    return {uri for uri, pointer in known.pointers.items() if not pointer}


class _Resources:
    def __init__(self, draft: int) -> None:
        self._id_keyword = "id" if draft == 4 else "$id"
        self._draft = draft
        self.pointers: dict[str, str] = {}  # of the resource with a URI
        self.anchors: dict[str, str] = {}  # pointers of the schemas with an anchor, by URI#anchor
        self._dynamic: dict[str, list[str]] = {}  # URI#anchor of the schemas with this dynamic anchor
        self._recursive: list[str] = []  # URIs of resources with a recursive anchor

    def add(self, parts: list[tuple[str, dict[str, Any]]]) -> Iterator[Part]:
        """Yields the parts with the resource that each belongs to."""
        bases = {"": ROOT}  # by pointer
        for at, part in parts:
            outer = at
            while outer not in bases:
                outer = outer.rpartition("/")[0]
            base = bases[outer]
            written = part.get(self._id_keyword)
            if isinstance(written, str) and not (self._draft <= 7 and "$ref" in part):
                address, fragment = urldefrag(written)
                if address:
                    base = _join(base, address)
                    self.pointers[base] = at
                if fragment and self._draft <= 7:
                    self.anchors[f"{base}#{fragment}"] = at
            if not at:
                self.pointers |= {ROOT: at, base: at}
            bases[at] = base
            self._add_anchors(at, part, base)
            yield at, part, base

    def _add_anchors(self, at: str, part: dict[str, Any], base: str) -> None:
        for keyword in ("$anchor", "$dynamicAnchor") if self._draft > 7 else ():
            if isinstance(part.get(keyword), str):
                self.anchors[f"{base}#{part[keyword]}"] = at
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(part[keyword], []).append(f"{base}#{part[keyword]}")
        if part.get("$recursiveAnchor") is True and self.pointers.get(base) == at:
            self._recursive.append(base)

    def rewrite(self, part: dict[str, Any], keyword: str, base: str) -> None:
        address, fragment = urldefrag(_join(base, part[keyword]))
        pointer, fragment = self.pointers.get(address), unquote(fragment)
        if pointer is None:
            return
        if keyword == "$dynamicRef":
            same = self._dynamic.get(fragment, [])
            if f"{address}#{fragment}" in same and len(same) > 1:
                return
        if keyword == "$recursiveRef" and address in self._recursive and len(self._recursive) > 1:
            return
        if fragment and not fragment.startswith("/"):
            pointer = self.anchors.get(f"{address}#{fragment}")
            if pointer is None:
                return
            fragment = ""
        reference = f"{ROOT}#{quote(pointer + fragment, safe=_SAFE)}"
        if keyword == "$ref":
            part["$ref"] = reference
        else:
            del part[keyword]
            part["allOf"] = [*part.get("allOf", []), {"$ref": reference}]


_SAFE = "/~!$&'()*+,;=:@?"


def _join(base: str, reference: str) -> str:
    """Returns a reference resolved against a base; also against a URN, to which only a fragment is relative."""
    if not reference or reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)
