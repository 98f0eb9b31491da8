"""Makes a schema part of another document, as the resource that it is: with its own ids, anchors and draft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.enums import upgrade_draft
from plait.constrained.json_schema.rewrite.references.resources import ROOT
from plait.constrained.specs import GrammarError

_NAMES = ("$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_BESIDE_REFERENCES: tuple[str, ...] = ("$ref", "$defs", "definitions", "title", "description")
_OLD_ITEMS = re.compile(r"/items(?=/[0-9]+(/|$))")


def embed_schema(schema: Mapping[str, Any], place: Callable[[str], str], base: str = ROOT) -> dict[str, Any]:
    """Returns an equivalent schema for a document of 2020-12, without ids and anchors.

    place: returns the reference, in that document, to the part of the schema at a JSON pointer ("" for all of it).
    base: the URI of the schema, to which its references are relative.
    Definitions that are not referred to are left out. References to other documents stay. Raises GrammarError.

    >>> embed_schema({"$id": "x:y", "items": {"$ref": "x:y#/$defs/a"}, "$defs": {"a": {}}}, "#/tool{}".format)
    {'items': {'$ref': '#/tool/$defs/a'}, '$defs': {'a': {}}}
    """
    document = SchemaDocument(json.dumps(schema), resources={"": base})
    assert isinstance(document.schema, dict), "it was an object before"
    for _, part in document.parts:
        for name in _NAMES:
            part.pop(name, None)
        if document.draft == 4:
            part.pop("id", None)
        if document.draft <= 7 and isinstance(part.get("$ref"), str):  # its siblings have no effect, but may be targets
            kept = {name: part[name] for name in _BESIDE_REFERENCES if name in part}
            part.clear()
            part |= kept
        if document.draft < 2020 and (upgraded := upgrade_draft(part, document)) is not None:
            part.clear()
            part |= upgraded
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith(("#", ROOT)):
            part["$ref"] = place(_pointer(reference, document))
    return document.schema


def _pointer(reference: str, document: SchemaDocument) -> str:
    """Returns the pointer of a local reference, to its place in 2020-12. Raises GrammarError for one to nothing."""
    pointer = reference.removeprefix(ROOT).removeprefix("#")
    if document.draft < 2020:
        pointer = _OLD_ITEMS.sub("/prefixItems", pointer).replace("/additionalItems", "/items")
        pointer = pointer.replace("/dependencies/", "/dependentSchemas/")
    if pointer and not pointer.startswith("/"):
        raise GrammarError("the reference points to nothing in the schema", "")
    return pointer
