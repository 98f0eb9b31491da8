"""Schemas of Pydantic's types that are written as text, such as URLs and decimal numbers: every text can be read.

Imported only if Pydantic is installed.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import PydanticUserError
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


def refuse(reason: str) -> NoReturn:
    """Raises PydanticUserError."""
    raise PydanticUserError(reason, code=None)


class ReadableTextGenerator(GenerateJsonSchema):
    """Generates patterns for types that are written as text. Raises PydanticUserError where no pattern is possible."""

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
