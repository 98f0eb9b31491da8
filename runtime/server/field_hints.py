"""What the error for an unknown field, or for one of a few values, adds: the field or the values that are meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from msgspec import inspect as types

from plait.runtime.similar_names import similar_name

MAX_VALUES = 20
MIN_SIMILARITY = 0.7
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")

# Fields of other servers -> fields here. The first that the object has, or an object in it, is meant. vLLM's older
# names guided_* are not accepted, as in vLLM since 0.12.
NAMES_ELSEWHERE = {
    "guided_json": ("response_format", "json_schema", "format"),
    "guided_regex": ("regex",),
    "guided_choice": ("choices",),
    "guided_grammar": ("ebnf",),
    "guided_decoding_backend": (),  # one engine compiles all constraints
    "structured_outputs": ("regex", "response_format"),
    "grammar": ("ebnf",),
    "schema": ("json_schema", "response_format", "format"),
    "max_new_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens", "max_new_tokens", "num_predict"),
    "n_predict": ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "num_predict"),
    "stop_sequences": ("stop",),
    "stop": ("stop_sequences",),
    "repeat_penalty": ("repetition_penalty",),
    "best_of": ("n",),
    "prompt": ("messages", "input", "text"),
    "input": ("messages", "prompt", "text"),
    "messages": ("input", "prompt"),
}
_CONSTRAINTS = ("response_format", "json_schema", "regex", "choices", "ebnf", "lark")


def unknown_field_hint(kind: Any, path: str, name: str) -> str:
    """Returns `"; write 'regex'"`, `"; did you mean 'stop'?"` or "", for the unknown field `name` of the object at
    `path` of a `kind`.

    >>> unknown_field_hint(dict[str, int], "", "x")
    ''
    """
    names = {field.encode_name: field.type for struct in _structs_at(kind, path) for field in struct.fields}
    if name == "structured_outputs" and (constraints := [known for known in _CONSTRAINTS if known in names]):
        return f"; write one of {', '.join(constraints)}"
    inner = {
        field.encode_name: f"{outer}.{field.encode_name}"
        for outer, field_type in names.items()
        for struct in _structs(field_type)
        for field in struct.fields
    }
    for known in (*NAMES_ELSEWHERE.get(name, ()), name):
        if known in names or known in inner:
            return f"; write '{known if known in names else inner[known]}'"
    meant = similar_name(name, names, MIN_SIMILARITY)
    return f"; did you mean '{meant}'?" if meant else ""


def allowed_values(kind: Any, path: str) -> str:
    """Returns `": it must be one of 'json', 'text'"` for a field at `path` of a `kind` that takes one of a few texts,
    otherwise ""."""
    object_path, _, name = path.rpartition(".")
    values: dict[Any, None] = {}
    for struct in _structs_at(kind, object_path):
        if struct.tag_field == name:
            values[struct.tag] = None
        for field in struct.fields:
            if field.encode_name == name:
                values |= dict.fromkeys(value for literal in _literals(field.type) for value in literal.values)
    if not 1 <= len(values) <= MAX_VALUES:
        return ""
    return f": it must be one of {', '.join(map(repr, values))}"


@cache
def _type_of(kind: Any) -> types.Type:
    return types.type_info(kind)


def _structs_at(kind: Any, path: str) -> list[types.StructType]:
    """The structs that the object at `path` can be."""
    reached: list[types.Type] = [_type_of(kind)]
    for step in _STEP.findall(path):
        reached = [below for above in reached for below in _step(above, step)]
    return [struct for kind_reached in reached for struct in _structs(kind_reached)]


def _step(above: types.Type, step: str) -> Iterator[types.Type]:
    for member in _members(above):
        if step.startswith("["):
            if isinstance(member, types.DictType):
                yield member.value_type
            elif isinstance(member, types.ListType | types.VarTupleType):
                yield member.item_type
        elif isinstance(member, types.StructType):
            yield from (field.type for field in member.fields if field.encode_name == step)


def _members(kind: types.Type) -> Iterable[types.Type]:
    if isinstance(kind, types.Metadata):
        return _members(kind.type)
    if isinstance(kind, types.UnionType):
        return [member for one in kind.types for member in _members(one)]
    return [kind]


def _structs(kind: types.Type) -> list[types.StructType]:
    return [member for member in _members(kind) if isinstance(member, types.StructType)]


def _literals(kind: types.Type) -> list[types.LiteralType]:
    return [member for member in _members(kind) if isinstance(member, types.LiteralType)]
