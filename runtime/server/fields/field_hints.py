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
MIN_SIMILARITY_OF_TYPOS = 0.85
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_RESOURCE = re.compile(r"(.*_)?(adapter|file|lora|path|template|uri|url)s?(_.*)?", re.DOTALL)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")

# Fields of other servers -> fields here. The first that the object has, or an object in it, is meant. vLLM's older
# names guided_* are not accepted, as in vLLM since 0.12.
NAMES_ELSEWHERE = {
    "guided_json": ("response_format", "json_schema", "format"),
    "guided_regex": ("regex",),
    "guided_choice": ("choices",),
    "guided_grammar": ("ebnf",),
    "guided_decoding_backend": (),  # one engine compiles all constraints
    "structured_outputs": ("regex", "response_format", "format", "json_schema"),
    "grammar": ("ebnf",),
    **dict.fromkeys(("schema", "response_schema"), ("json_schema", "response_format", "format")),
    **dict.fromkeys(("json_mode", "response_mime_type"), ("response_format", "format", "json_schema")),
    "max_new_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens", "max_new_tokens", "num_predict"),
    "n_predict": ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "num_predict"),
    **dict.fromkeys(("stop_sequences", "stop_words"), ("stop", "stop_sequences")),
    "stop": ("stop_sequences",),
    "repeat_penalty": ("repetition_penalty",),
    "best_of": ("n",),
    "prompt": ("messages", "input", "text"),
    "input": ("messages", "prompt", "text"),
    "messages": ("input", "prompt"),
    "system": ("instructions", "messages"),
    "instructions": ("system", "messages"),
    "thinking_budget": ("reasoning", "thinking", "think"),
    "reasoning": ("reasoning_effort", "thinking", "think"),
    "reasoning_effort": ("reasoning", "thinking", "think"),
    "thinking": ("reasoning", "think"),
    "think": ("reasoning", "thinking"),
    "response_format": ("format", "json_schema"),
    "json_schema": ("format",),
    "format": ("response_format",),
    **dict.fromkeys(("regex", "ebnf", "lark", "choices", "structural_tag", "tools", "tool_choice"), ()),
}


def unknown_field_hint(kind: Any, path: str, name: str) -> str:
    """Returns `"; write 'regex'"`, `"; did you mean 'stop'?"` or "", for the unknown field `name` of the object at
    `path` of a `kind`.

    >>> unknown_field_hint(dict[str, int], "", "x")
    ''
    """
    names = {field.encode_name: field.type for struct in _structs_at(kind, path) for field in struct.fields}
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


def meant_field(kind: Any, name: str, known: Iterable[str]) -> str | None:
    """Returns the hint for the unknown field `name` of a body of a `kind`, if it must not pass as another server's.

    That is a field of the kind's objects, or another server's field of the same purpose, or resembles such a name or
    one of `known`: it has a meaning, but for its place or spelling. So has the name of a file or the like. Otherwise
    returns None. Compound names, such as
    thread_id, do not resemble their parts.
    """
    own = {field.encode_name: field.type for struct in _structs_at(kind, "") for field in struct.fields}
    inner = {field.encode_name for kind in own.values() for struct in _structs(kind) for field in struct.fields}
    if name in NAMES_ELSEWHERE or name in inner or name in known:
        return unknown_field_hint(kind, "", name)
    spellings = {_plain(field): field for field in (*known, *NAMES_ELSEWHERE, *own)}
    plain = _plain(name)
    meant = spellings.get(similar_name(plain, spellings, MIN_SIMILARITY_OF_TYPOS) or "")
    if meant is None or set(plain.split("_")) > set(_plain(meant).split("_")):
        return "; a request names no files, addresses, adapters and templates" if _RESOURCE.fullmatch(plain) else None
    return unknown_field_hint(kind, "", meant if meant in NAMES_ELSEWHERE and meant not in own else name)


def _plain(name: str) -> str:
    """
    >>> _plain("maxTokens"), _plain("max-tokens")
    ('max_tokens', 'max_tokens')
    """
    return _CAMEL_CASE.sub("_", name).replace("-", "_").lower()


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


def struct_types(kind: types.Type) -> list[types.StructType]:
    """The structs that a value, or the items of a list, can be."""
    items = [member.item_type for member in _members(kind) if isinstance(member, types.ListType)]
    return [*_structs(kind), *(struct for item in items for struct in _structs(item))]


def _structs(kind: types.Type) -> list[types.StructType]:
    return [member for member in _members(kind) if isinstance(member, types.StructType)]


def _literals(kind: types.Type) -> list[types.LiteralType]:
    return [member for member in _members(kind) if isinstance(member, types.LiteralType)]
