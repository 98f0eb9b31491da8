"""Bundles a schema with the documents that it refers to into one document whose references are pointers from its root.

Source of the term: JSON Schema 2020-12, section 9.3. Nothing is fetched: the caller gives the documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urldefrag

import msgspec

from plait.constrained.json_schema.embedded_resource import embed_schema
from plait.constrained.json_schema.rewrite.document import SchemaDocument, draft_of, escape_pointer_token, parse_json
from plait.constrained.json_schema.rewrite.references.resources import DEFINITIONS, ROOT, join_reference
from plait.constrained.specs import GrammarError, JsonSchema

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def bundled(spec: JsonSchema) -> JsonSchema:
    """Returns an equivalent spec without `schemas`: the documents that are referred to are definitions of its schema.

    The name of a definition is the URI of its document, and JSON pointers of errors begin with it. Documents of
    another draft than the schema's are written in 2020-12, as the schema then is. Raises GrammarError.

    >>> bundled(JsonSchema({"$ref": "x:y"}, schemas={"x:y": {"type": "null"}})).text
    '{"$ref": "#/$defs/x:y", "$defs": {"x:y": {"type": "null"}}}'
    """
    if not spec.schemas:
        return spec
    root, given = parse_json(spec.text), parse_json(str(spec.schemas))
    if not isinstance(given, dict):
        raise GrammarError("schemas maps URIs to schemas")
    if not isinstance(root, dict):
        return msgspec.structs.replace(spec, schemas="")
    used = _reached(root, given)
    return msgspec.structs.replace(spec, schema=_bundle(root, used) if used else spec.text, schemas="")


def _reached(root: dict[str, Any], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the given documents, by URI, to which references lead from the root."""
    base = _base(root, ROOT)
    documents = {urldefrag(join_reference(base, uri))[0]: _as_object(schema) for uri, schema in given.items()}
    by_name = {_base(schema, uri): uri for uri, schema in documents.items()} | {uri: uri for uri in documents}
    found, todo = dict[str, dict[str, Any]](), [(base, root)]
    own = {base, ROOT}
    while todo:
        base, document = todo.pop()
        for address, is_reference in _addresses(document, base):
            if not is_reference:
                own.add(address)
            elif address not in own and (uri := by_name.get(address)) is not None and uri not in found:
                found[uri] = documents[uri]
                todo.append((uri, documents[uri]))
    return found


def _as_object(schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise GrammarError("a schema is an object, true or false", "/schemas")
    return schema


def _base(schema: dict[str, Any], base: str) -> str:
    written = schema.get("$id", schema.get("id"))
    return urldefrag(join_reference(base, written))[0] if isinstance(written, str) else base


def _addresses(part: Any, base: str) -> Iterator[tuple[str, bool]]:
    """Yields the URIs, without fragment, of all resources and references in a document, and whether it is the latter.

    A name such as `$ref` in a listed value counts as well, which adds a document in vain and changes no meaning.
    """
    todo = [(part, base)]
    while todo:
        part, base = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$id", part.get("id")), str):
                base = _base(part, base)
                yield base, False
            for name in _REFERENCES:
                if isinstance(part.get(name), str):
                    yield urldefrag(join_reference(base, part[name]))[0], True
            todo += [(inner, base) for inner in part.values()]
        elif isinstance(part, list):
            todo += [(inner, base) for inner in part]


def _bundle(root: dict[str, Any], used: dict[str, dict[str, Any]]) -> str:
    draft = draft_of(root)
    if any(draft_of(schema, draft) != draft for schema in used.values()):
        named = {"$schema": root["$schema"]} if "$schema" in root else {}
        used = {uri: embed_schema({**named, **schema}, "#{}".format, uri) for uri, schema in used.items()}
        root = embed_schema(root, "#{}".format, _base(root, ROOT))
    definitions = root.get(DEFINITIONS, {})
    if not isinstance(definitions, dict) or definitions.keys() & used.keys():
        raise GrammarError("a definition has the URI of another document as its name", f"/{DEFINITIONS}")
    merged = {**root, DEFINITIONS: {**definitions, **used}}
    places = {f"/{DEFINITIONS}/{escape_pointer_token(uri)}": uri for uri in used}
    document = SchemaDocument(json.dumps(merged), resources=places)
    for _, part in document.parts:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith(f"{ROOT}#"):
            part["$ref"] = reference.removeprefix(ROOT)
    return json.dumps(document.schema, ensure_ascii=False)
