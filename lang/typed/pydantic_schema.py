"""JSON schemas and parsers of types that need Pydantic: its models, and unions of several classes.

Imported only if Pydantic is installed. Pydantic's own schema does not constrain number keys of a dict, although its
parser accepts only numbers there; this one adds a pattern for them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NoReturn

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from plait.lang.typed import patterns

_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LIMITS["multiple_of"] = "multipleOf"
_EDGE = r"[^\s\u001c-\u001f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
"""A character that stripping white space keeps."""

_REFUSED_FUNCTIONS = {
    "import_string": "the text of an ImportString would be imported",
    "PathType.validate_file": "a constraint does not know which files exist; use Path",
    "PathType.validate_directory": "a constraint does not know which folders exist; use Path",
    "PathType.validate_new": "a constraint does not know which files exist; use Path",
    "PathType.validate_socket": "a constraint does not know which sockets exist; use Path",
}
_KEYS = {"int": patterns.INTEGER, "float": patterns.NUMBER, "decimal": patterns.NUMBER, "bool": "true|false"}
_BOUNDS = frozenset(("ge", "gt", "le", "lt", "multiple_of", "max_digits", "decimal_places"))
_VALIDATORS = ("function-after", "function-before", "function-wrap")
_PLAIN = (str, int, float, bool, type(None))
_NO_KEYS = ("tuple", "bytes", "model", "dataclass", "typed-dict", "definition-ref")
_UNHASHABLE = ("any", "list", "set", "dict", "model", "dataclass", "typed-dict", "definition-ref", "generator", "chain")


def refuse(reason: str) -> NoReturn:
    """Raises PydanticUserError."""
    raise PydanticUserError(reason, code=None)


class ReadableSchemaGenerator(GenerateJsonSchema):
    """Generates schemas with a pattern for types that are written as text, and for the keys of every dict. Raises
    PydanticUserError for a type whose schema allows values that Pydantic cannot parse, since a complete generated value
    must always be readable."""

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        limits = {keyword: float(schema[name]) for name, keyword in _LIMITS.items() if schema.get(name) is not None}
        if limits and ("max_digits" in schema or "decimal_places" in schema):
            refuse("a constraint cannot hold both the bounds and the digits of a Decimal; keep one of them")
        if limits:
            return {"type": "number", **limits}
        return patterns.text_schema(patterns.decimal(schema.get("max_digits"), schema.get("decimal_places")))

    def complex_schema(self, schema: Any) -> JsonSchemaValue:
        return patterns.text_schema(patterns.COMPLEX)

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "datetime")
        match schema.get("tz_constraint"):
            case None | "aware":
                return patterns.text_schema(patterns.DATETIME)
            case "naive":
                return patterns.text_schema(patterns.NAIVE_DATETIME)
        refuse("a constraint cannot hold a datetime with a given offset")

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "date")
        return super().date_schema(schema)

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "time")
        if schema.get("tz_constraint") not in (None, "naive"):
            refuse("a time is written without an offset")
        return super().time_schema(schema)

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "timedelta")
        return super().timedelta_schema(schema)

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        if schema.get("max_length", 2083) < 1000:
            refuse("a constraint cannot limit the length of a URL")
        return patterns.text_schema(patterns.url(schema.get("allowed_schemes")))

    def multi_host_url_schema(self, schema: Any) -> JsonSchemaValue:
        return self.url_schema(schema)

    def str_schema(self, schema: Any) -> JsonSchemaValue:
        json_schema = super().str_schema(schema)
        changes = [name for name in ("strip_whitespace", "to_lower", "to_upper") if schema.get(name)]
        if not changes or not {"pattern", "minLength"} & json_schema.keys():
            return json_schema
        if "pattern" in json_schema:
            refuse(f"a text with {changes[0]} cannot have a pattern too")
        if "strip_whitespace" not in changes:
            refuse(f"a text with {changes[0]} cannot have a minimal length too")
        return _stripped(json_schema)

    def json_schema(self, schema: Any) -> JsonSchemaValue:
        refuse("Json is JSON within a text, which a constraint cannot hold; use the type of its value")

    def is_subclass_schema(self, schema: Any) -> JsonSchemaValue:
        refuse("a class cannot be written as JSON")

    def chain_schema(self, schema: Any) -> JsonSchemaValue:
        if any(step.get("type") == "is-instance" for step in schema["steps"]):
            refuse("a value must be of a class that JSON does not show; name the type")
        return super().chain_schema(schema)

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        if schema.get("on_error") == "omit":
            refuse("OnErrorOmit leaves out what cannot be read; use the type itself")
        return super().default_schema(schema)

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        name = _function_name(schema) if str(schema.get("type")).startswith("function-") else ""
        if name in _REFUSED_FUNCTIONS:
            refuse(_REFUSED_FUNCTIONS[name])
        if name == "ByteSize._validate":
            return {"type": "integer", "minimum": 0}
        return super().generate_inner(schema)

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return _set_of(schema, super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return _set_of(schema, super().frozenset_schema(schema))

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        if not all(isinstance(member.value, _PLAIN) for member in schema["members"]):
            refuse(f"{schema['cls'].__name__} has members that are not text, numbers, bools or None")
        return super().enum_schema(schema)

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        member = next((value for value in schema["expected"] if isinstance(value, enum.Enum)), None)
        if member is not None:
            name = type(member).__name__
            refuse(f"a Literal inside another type cannot contain {member}; use {name} itself, or its values")
        return super().literal_schema(schema)

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        json_schema, key = _with_property_names(super().dict_schema(schema)), schema.get("keys_schema", {})
        while key.get("type") in _VALIDATORS:
            key = key["schema"]
        kind = key.get("type", "any")
        if kind in _KEYS and not _BOUNDS & key.keys():
            return json_schema | {"propertyNames": patterns.text_schema(_KEYS[kind])}
        if kind == "enum" and _is_read_from_text(key):
            return json_schema | {"propertyNames": {"enum": [str(member.value) for member in key["members"]]}}
        is_constrained = kind not in (*_KEYS, *_NO_KEYS, "enum") and "propertyNames" in json_schema
        if not is_constrained and not _is_text(key):
            refuse("the keys of a dict must be text, or numbers without bounds")
        return json_schema


def _stripped(json_schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of texts of these lengths that neither begin nor end with white space."""
    low, high = max(json_schema["minLength"], 1), json_schema.get("maxLength")
    middle = f"[^\\n]{{{max(low - 2, 0)},{'' if high is None else max(high - 2, 0)}}}"
    single = f"{_EDGE}|" if low == 1 else ""
    return patterns.text_schema(f"{single}{_EDGE}{middle}{_EDGE}" if high != 1 else _EDGE)


def _refuse_limits(schema: Any, kind: str) -> None:
    if {"ge", "gt", "le", "lt", "now_op"} & schema.keys():
        refuse(f"a constraint cannot hold a {kind} with bounds, such as PastDate; use {kind}, and check it afterwards")


def _function_name(schema: Any) -> str:
    """Returns the name of Pydantic's own function in a core schema; empty if the function is someone else's."""
    function = schema["function"].get("function")
    is_own = str(getattr(function, "__module__", "")).startswith("pydantic.")
    return str(getattr(function, "__qualname__", "")) if is_own else ""


def _with_property_names(json_schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of a dict in which the pattern of keys is one of all names; Pydantic parses no other names."""
    if "patternProperties" not in json_schema:
        return json_schema
    rest = {name: value for name, value in json_schema.items() if name != "patternProperties"}
    ((pattern, values),) = json_schema["patternProperties"].items()
    return rest | {"additionalProperties": values, "propertyNames": {"type": "string", "pattern": pattern}}


def _set_of(schema: Any, json_schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema without `uniqueItems`: items that repeat are one item of the set that is read."""
    if schema.get("min_length", 0) > 1:
        refuse("a constraint cannot ensure that a set has at least two different items")
    if not _is_hashable(schema.get("items_schema", {})):
        refuse("a constraint cannot ensure that the items of this set are hashable; name their type")
    return {name: value for name, value in json_schema.items() if name != "uniqueItems"}


def _is_hashable(schema: Any) -> bool:
    """Whether all values of a core schema can be items of a set."""
    kind = schema.get("type", "any")
    if kind == "nullable" or kind in _VALIDATORS:
        return _is_hashable(schema["schema"])
    if kind == "union":
        return all(_is_hashable(choice[0] if isinstance(choice, tuple) else choice) for choice in schema["choices"])
    if kind == "tuple":
        return all(map(_is_hashable, schema["items_schema"]))
    return kind not in _UNHASHABLE


def _is_read_from_text(key: Any) -> bool:
    """Whether Pydantic can parse every member of an enum from text: text values, or the numbers of an IntEnum."""
    kinds = {type(member.value) for member in key["members"]}
    return kinds == {str} or (kinds == {int} and issubclass(key["cls"], int))


def _is_text(key: Any) -> bool:
    """Whether any text can be parsed as such a key."""
    kind = key.get("type", "any")
    if kind == "nullable" or kind in _VALIDATORS:
        return _is_text(key["schema"])
    if kind == "union":
        return any(_is_text(choice[0] if isinstance(choice, tuple) else choice) for choice in key["choices"])
    return kind in ("str", "any")


def schema_and_reader(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Returns the schema of `type_` and a parser of its JSON text. Raises TypeError for an unsupported type."""
    try:
        adapter = TypeAdapter(type_)
        return adapter.json_schema(schema_generator=ReadableSchemaGenerator), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticUserError, AssertionError, ImportError) as error:
        # ImportError: of a package for a type of text; AssertionError: of an empty Literal
        raise TypeError(str(error).splitlines()[0]) from None
