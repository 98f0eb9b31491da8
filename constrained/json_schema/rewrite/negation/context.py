"""What is known about the values that a complement is for: the schemas that all of them match."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plait.constrained.json_schema.rewrite.analysis import are_disjoint, conjuncts, property_schemas
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.enums import canonical_json

_SIBLINGS = {  # keywords that change what a keyword means
    "additionalProperties": ("properties", "patternProperties"),
    "items": ("prefixItems",),
    "additionalItems": ("items",),
    "contains": ("minContains", "maxContains"),
    "minContains": ("contains", "maxContains"),
    "maxContains": ("contains", "minContains"),
    "if": ("then", "else"),
    "then": ("if", "else"),
    "else": ("if", "then"),
    "minimum": ("exclusiveMinimum",),
    "maximum": ("exclusiveMaximum",),
    "exclusiveMinimum": ("minimum",),
    "exclusiveMaximum": ("maximum",),
}
_NEVER_IMPLIED = frozenset(("unevaluatedItems", "unevaluatedProperties"))


@dataclass(frozen=True)
class Context:
    """What is known about the values that a complement is for: they match all of `parts`.

    `is_partial`: values may be left out of a complement that violate the schema only by what has no complement.
    """

    document: SchemaDocument
    parts: tuple[dict[str, Any], ...] = ()
    is_partial: bool = False
    depth: int = 0

    def of_property(self, name: str) -> Context:
        """Returns what is known about the values of a property."""
        return self._of([inner for part in self.parts for inner in property_schemas(part, name)])

    def of_items(self) -> Context:
        """Returns what is known about every item of an array."""
        alike = [part for part in self.parts if not {"prefixItems", "additionalItems"} & part.keys()]
        return self._of([part["items"] for part in alike if isinstance(part.get("items"), dict)])

    def _of(self, schemas: list[Schema]) -> Context:
        return replace(self, parts=flattened(schemas, self.document))

    def excludes(self, schema: Schema) -> bool:
        """Returns whether it is proved that none of the values matches `schema`."""
        return bool(self.parts) and are_disjoint({"allOf": list(self.parts)}, schema, self.document)

    def implies(self, schema: dict[str, Any], name: str) -> bool:
        """Returns whether all values are known to match the keyword `name` of `schema`, by an equal keyword."""
        names = (name, *_SIBLINGS.get(name, ()))
        if name in _NEVER_IMPLIED:
            return False
        if name == "required":
            known = {n for part in self.parts for n in part.get("required", ()) if isinstance(n, str)}
            return known >= set(schema["required"])
        return any(
            name in part and all(_is_same(part.get(other), schema.get(other)) for other in names) for part in self.parts
        )

    def names(self) -> tuple[list[str], bool]:
        """Returns the listed names of properties, and whether the objects have no others."""
        listed = list(dict.fromkeys(name for part in self.parts for name in part.get("properties", {})))
        closed = [
            part
            for part in self.parts
            if part.get("additionalProperties") is False and not part.get("patternProperties")
        ]
        return listed, bool(closed)


def flattened(schemas: list[Schema], document: SchemaDocument) -> tuple[dict[str, Any], ...]:
    """Returns the schemas that a value that matches all of `schemas` matches, those of references too."""
    parts: list[Schema] = []
    for schema in schemas:
        if isinstance(schema, dict) and "$ref" in schema:
            parts.append({"$ref": schema["$ref"]})
        parts += conjuncts(schema, document)
    return tuple(part for part in parts if isinstance(part, dict))


def _is_same(one: Any, other: Any) -> bool:
    return canonical_json(one) == canonical_json(other)
