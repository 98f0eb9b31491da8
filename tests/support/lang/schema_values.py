"""A hypothesis strategy for the values that a schema of `plait.lang.typed` allows."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

from plait.constrained.specs import Choices, JsonSchema, Regex, Spec

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(st.text("ab", max_size=2), parts, max_size=2),
    max_leaves=3,
)


def texts_of(spec: Spec | None) -> st.SearchStrategy[str]:
    """The texts that a constraint allows."""
    if isinstance(spec, Regex):
        return st.from_regex(re.compile(spec.pattern, re.ASCII), fullmatch=True)
    if isinstance(spec, Choices):
        return st.sampled_from(spec.choices)
    if isinstance(spec, JsonSchema):
        schema = json.loads(spec.text)
        return values_of(schema, schema).map(json.dumps)
    assert spec is None
    return st.text(max_size=8)


def values_of(schema: Any, root: Any) -> st.SearchStrategy[Any]:
    """Values of `schema`, a part of the document `root`. A keyword that this function does not know is an error."""
    if schema is True or schema == {}:
        return ANYTHING
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: values_of(root["$defs"][name], root))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return st.one_of([values_of(branch, root) for branch in schema[name]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return _numbers(schema)
        case "string":
            return _texts(schema)
        case "array":
            return _arrays(schema, root)
        case "object":
            return _objects(schema, root)
        case None if not schema.keys() - {"title", "description", "default"}:
            return ANYTHING
    raise AssertionError(f"this schema is not known here: {schema}")


def _numbers(schema: Any) -> st.SearchStrategy[Any]:
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low, high = schema.get("minimum", above), schema.get("maximum", below)
    if schema["type"] == "integer" or "multipleOf" in schema:
        step = schema.get("multipleOf", 1)
        values = st.integers(int(low // step), int(high // step) + 1).map(lambda n: n * step)
    else:
        values = st.floats(low, high)
    return values.filter(lambda n: low <= n <= high and n not in (above, below))


def _texts(schema: Any) -> st.SearchStrategy[str]:
    assert "format" not in schema, f"a format admits what its type may not: {schema}"
    low, high = schema.get("minLength", 0), schema.get("maxLength", 40)
    if "pattern" in schema:
        texts = st.from_regex(re.compile(schema["pattern"], re.ASCII)).filter(lambda text: not text.endswith("\n"))
        return (
            texts.filter(lambda text: low <= len(text) <= high) if {"minLength", "maxLength"} & schema.keys() else texts
        )
    return st.text(min_size=low, max_size=min(high, low + 8))


def _arrays(schema: Any, root: Any) -> st.SearchStrategy[list[Any]]:
    first = [values_of(part, root) for part in schema.get("prefixItems", ())]
    rest, low, high = schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems", len(first) + 3)
    if rest is False or high <= len(first):
        return st.tuples(*first[:high]).map(list)
    others = st.lists(values_of(rest, root), min_size=max(low - len(first), 0), max_size=high - len(first))
    return st.tuples(st.tuples(*first), others).map(lambda both: [*both[0], *both[1]])


def _objects(schema: Any, root: Any) -> st.SearchStrategy[dict[str, Any]]:
    assert "patternProperties" not in schema
    known, required = schema.get("properties", {}), schema.get("required", ())
    fields = {name: values_of(part, root) for name, part in known.items()}
    objects = st.fixed_dictionaries(
        {name: fields[name] for name in required}, optional={n: f for n, f in fields.items() if n not in required}
    )
    others = schema.get("additionalProperties", True)
    if others is False:
        return objects
    names = values_of({"type": "string"} | schema.get("propertyNames", {}), root)
    more = st.dictionaries(names.filter(lambda name: name not in known), values_of(others, root), max_size=2)
    return st.tuples(more, objects).map(lambda both: both[0] | both[1])
