"""A tool: a plain typed function as the model sees it (name, description, JSON schema) and as it is called."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from plait.lang.tools.docstring import read_docstring
from plait.lang.typed.schema_rewriting import schema_for_prompt
from plait.lang.typed.value_format import json_schema_and_parser
from plait.runtime.errors import InputError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
MAX_TOOLS = 128


@dataclass(frozen=True)
class Tool:
    """`parameters` is the JSON schema of the arguments, `read` makes typed keyword arguments of their JSON text."""

    name: str
    description: str
    parameters: dict[str, Any]
    read: Callable[[str], dict[str, Any]]
    function: Callable[..., Any]

    def as_json(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API name it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": schema_for_prompt(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """What `s[name]` of `gen(name, tools=...)` is: the tool's name, and its arguments as the function takes them."""

    name: str
    arguments: dict[str, Any]
    tool: Tool = field(repr=False, compare=False)


def make_tool(where: str, function: Any) -> Tool:
    """The tool that `function` is. InputError for one without a name, or a parameter without a type."""
    name = getattr(function, "__name__", None)
    if not callable(function) or isinstance(function, type) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{where}: a tool is a function with a name of letters and digits, not {function!r:.80}")
    description, parameter_docs = read_docstring(inspect.getdoc(function))
    arguments = _arguments_class(where, name, function)
    try:
        schema, read = json_schema_and_parser(arguments)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"{where}: the tool {name!r} cannot be described as a JSON schema: {error}") from None
    names = [each.name for each in dataclasses.fields(arguments)]

    def keywords(text: str) -> dict[str, Any]:
        value = read(text)
        return {name: getattr(value, name) for name in names}

    return Tool(name, description, _inline_root(schema, parameter_docs), keywords, function)


def make_tools(where: str, functions: object) -> tuple[Tool, ...]:
    """The tools of a list of functions, each name once."""
    if isinstance(functions, (str, bytes)) or not isinstance(functions, Iterable):
        raise InputError(f"{where}: tools must be a list of functions, not {functions!r:.80}")
    tools = tuple(make_tool(where, function) for function in functions)
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InputError(f"{where}: there must be 1 to {MAX_TOOLS} tools, not {len(tools)}")
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: two tools are named {twice!r}")
    return tools


def call_schema(tools: Iterable[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """The schema of one call of one of `tools`, as a JSON object with these two keys."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        own = {f"{tool.name}.{name}": each for name, each in tool.parameters.get("$defs", {}).items()}
        moved = _prefix_refs({key: each for key, each in tool.parameters.items() if key != "$defs"}, tool.name)
        definitions |= {name: _prefix_refs(each, tool.name) for name, each in own.items()}
        calls.append(
            {
                "type": "object",
                "properties": {name_key: {"const": tool.name}, arguments_key: moved},
                "required": [name_key, arguments_key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | ({"$defs": definitions} if definitions else {})


def read_call(text: str, tools: Iterable[Tool], name_key: str, arguments_key: str) -> ToolCall:
    """The call written in `text`. Raises ValueError where its arguments are not what the function takes."""
    said = json.loads(text)
    tool = next(tool for tool in tools if tool.name == said[name_key])
    return ToolCall(tool.name, tool.read(json.dumps(said[arguments_key])), tool)


def _arguments_class(where: str, name: str, function: Callable[..., Any]) -> type:
    """A dataclass with the function's parameters as fields."""
    try:
        signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"{where}: the types of the tool {name!r} cannot be read: {error}") from None
    fields: list[Any] = []
    for each in signature.parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise InputError(f"{where}: parameter {each.name!r} of the tool {name!r} cannot be given by its name")
        if each.name not in hints:
            raise InputError(f"{where}: parameter {each.name!r} of the tool {name!r} needs a type")
        fields.append((each.name, hints[each.name], _field(each)))
    return dataclasses.make_dataclass(f"{name}_arguments", fields)


def _field(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return dataclasses.field(kw_only=True)
    # a factory, so that any default will do, and is not part of the schema
    return dataclasses.field(kw_only=True, default_factory=lambda: parameter.default)


def _inline_root(schema: dict[str, Any], parameter_docs: dict[str, str]) -> dict[str, Any]:
    """The schema of the arguments' own object at the root, with what the docstring says of each."""
    definitions = dict(schema.get("$defs", {}))
    root = schema
    if "$ref" in schema:
        root = definitions.pop(schema["$ref"].rpartition("/")[2])
    properties = {
        name: each | ({"description": parameter_docs[name]} if name in parameter_docs else {})
        for name, each in root.get("properties", {}).items()
    }
    whole = {"type": "object", "properties": properties, "required": root.get("required", [])}
    return whole | {"additionalProperties": False} | ({"$defs": definitions} if definitions else {})


def _prefix_refs(schema: Any, prefix: str) -> Any:
    """`schema` with its references pointing to definitions under `prefix`."""
    if isinstance(schema, list):
        return [_prefix_refs(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    fresh = {}
    for key, each in schema.items():
        is_reference = key == "$ref" and isinstance(each, str) and each.startswith("#/$defs/")
        fresh[key] = f"#/$defs/{prefix}.{each.removeprefix('#/$defs/')}" if is_reference else _prefix_refs(each, prefix)
    return fresh
