"""Rewrites the references of a document, also by `$id` and anchor and dynamic ones, to JSON pointers from its root.

A document may contain schemas with an `$id`, which are resources: the base of the references below them. Nothing is
fetched; a reference to another document stays as it is, and is refused where it is followed. Meta-schemas that are
referred to become definitions of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urldefrag, urljoin

from plait.constrained.json_schema.metaschemas import metaschemas_for

ROOT = "http://root.invalid/"  # the URI under which a subschema's validator finds the document
DEFINITIONS = "$defs"
Part: TypeAlias = tuple[str, dict[str, Any], str]
"""The pointer of a subschema, the subschema, and the URI of the resource that it belongs to."""


def add_metaschemas(schema: dict[str, Any], parts: list[tuple[str, dict[str, Any]]], draft: int) -> dict[str, bool]:
    """Adds the meta-schemas that a document refers to, and does not contain, to its definitions.

    `parts`: (pointer, subschema), outer ones first. Returns the URIs of the new definitions, and whether the document
    itself refers to them.

    >>> schema = {"items": {"$ref": "http://json-schema.org/draft-07/schema#"}}
    >>> add_metaschemas(schema, [("", schema), ("/items", schema["items"])], 7)
    {'http://json-schema.org/draft-07/schema': True}
    """
    if not any("json-schema.org" in str(part.get(name, "")) for _, part in parts for name in ("$ref", "id", "$id")):
        return {}
    known = Resources(draft)
    referred = {
        urldefrag(join_reference(base, part[keyword]))[0]
        for _, part, base in list(known.add(parts))
        for keyword in ("$ref", "$dynamicRef")
        if isinstance(part.get(keyword), str)
    } - known.pointers.keys()
    added = metaschemas_for(referred, draft)
    definitions = schema.setdefault(DEFINITIONS, {}) if added else {}
    if not isinstance(definitions, dict) or definitions.keys() & added.keys():
        return {}
    added = {uri: found for uri, found in added.items() if uri not in known.pointers}
    definitions |= added
    return {uri: uri in referred for uri in added}


def resolve_references(
    parts: list[tuple[str, dict[str, Any]]],
    draft: int,
    metaschemas: dict[str, bool] | None = None,
    given: dict[str, str] | None = None,
) -> set[str]:
    """Rewrites the references in `parts`, (pointer, subschema) outer ones first, and removes their ids and anchors.

    Proof for dynamic references: the target is the outermost schema of the dynamic scope with the same dynamic anchor.
    If only one schema of the document has it, it is that one. The resource of the root is the outermost one of every
    scope, so if it has the anchor, it is the one there. `metaschemas`: what `add_metaschemas` returned. If only those
    have the anchor, and the document itself refers to one of them only, that one is the next in every scope. Other
    references stay, and are refused. `given`: pointer -> URI of a resource, beside the one that its `$id` says.

    Returns the URIs of the root.

    >>> part = {"$id": "http://a.b/c", "items": {"$ref": "c#/x"}}
    >>> sorted(resolve_references([("", part), ("/items", part["items"])], 2020)), part["items"]
    (['http://a.b/c', 'http://root.invalid/'], {'$ref': 'http://root.invalid/#/x'})
    """
    known = Resources(draft, metaschemas, given)
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


class Resources:
    """The resources and anchors of a document, by URI."""

    def __init__(
        self, draft: int, metaschemas: dict[str, bool] | None = None, given: dict[str, str] | None = None
    ) -> None:
        self._root = ""  # URI of the resource of the root
        self._metaschemas = metaschemas or {}
        self._given = given or {}
        self._id_keyword = "id" if draft == 4 else "$id"
        self._draft = draft
        self.pointers: dict[str, str] = {}  # of the resource with a URI
        self.anchors: dict[str, str] = {}  # pointers of the schemas with an anchor, by URI#anchor
        self._dynamic: dict[str, list[str]] = {}  # URI#anchor of the schemas with this dynamic anchor
        self._recursive: list[str] = []  # URIs of resources with a recursive anchor
        self._reference_to = cache(self._reference)  # for `rewrite`, once all parts are added

    def add(self, parts: list[tuple[str, dict[str, Any]]]) -> Iterator[Part]:
        """Yields the parts with the resource that each belongs to."""
        bases = {"": ROOT} | self._given  # by pointer
        self.pointers |= {uri: at for at, uri in self._given.items()}
        for at, part in parts:
            outer = at
            while outer not in bases:
                outer = outer.rpartition("/")[0]
            base = bases[outer]
            written = part.get(self._id_keyword)
            if isinstance(written, str) and not (self._draft <= 7 and "$ref" in part):
                address, fragment = urldefrag(written)
                if address:
                    base = join_reference(base, address)
                    self.pointers[base] = at
                if fragment and self._draft <= 7:
                    self.anchors[f"{base}#{fragment}"] = at
            if not at:
                self.pointers |= {ROOT: at, base: at}
                self._root = base
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
        reference = self._reference_to(keyword, base, part[keyword])
        if reference is None:
            return
        if keyword == "$ref":
            part["$ref"] = reference
        else:
            del part[keyword]
            part["allOf"] = [*part.get("allOf", []), {"$ref": reference}]

    def _reference(self, keyword: str, base: str, written: str) -> str | None:
        """Returns what a reference is replaced by, or None if it stays."""
        address, fragment = urldefrag(join_reference(base, written))
        fragment = unquote(fragment)
        having = [uri.partition("#")[0] for uri in self._dynamic.get(fragment, ())]
        if keyword == "$recursiveRef":
            having = self._recursive
        if keyword != "$ref" and address in having:
            address = self._outermost(having)
        pointer = self.pointers.get(address)
        if pointer is None:  # the base is not known afterwards
            return f"{address}#{fragment}" if keyword == "$ref" and not base.startswith(ROOT) else None
        if fragment and not fragment.startswith("/"):
            pointer = self.anchors.get(f"{address}#{fragment}")
            if pointer is None:
                return None
            fragment = ""
        return f"{ROOT}#{quote(pointer + fragment, safe=_SAFE)}"

    def targets(self, parts: list[tuple[str, dict[str, Any]]]) -> set[str]:
        """Returns the pointers to which the `$ref` of these parts lead, but for those to anchors."""
        found = set()
        for _, part, base in list(self.add(parts)):
            if isinstance(part.get("$ref"), str):
                address, fragment = urldefrag(join_reference(base, part["$ref"]))
                if address in self.pointers and (not fragment or fragment.startswith("/")):
                    found.add(self.pointers[address] + unquote(fragment))
        return found

    def _outermost(self, having: list[str]) -> str:
        """Returns the first resource of every dynamic scope, of these that have an anchor; "" if that is not known."""
        if len(having) == 1 or self._root in having:
            return having[0] if len(having) == 1 else self._root
        entries = [uri for uri, is_referred_to in self._metaschemas.items() if is_referred_to]
        return (
            entries[0] if len(entries) == 1 and entries[0] in having and self._metaschemas.keys() >= set(having) else ""
        )


_SAFE = "/~!$&'()*+,;=:@?"


def join_reference(base: str, reference: str) -> str:
    """Returns a reference resolved against a base; also against a URN, to which only a fragment is relative.

    >>> join_reference("urn:x:y", "#z")
    'urn:x:y#z'
    """
    if not reference or reference.startswith("#"):
        return base + reference
    return urljoin(base, reference)
