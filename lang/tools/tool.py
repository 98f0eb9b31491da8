"""`Tool`: a typed Python function as the model sees it (name, description, JSON schema) and as plait calls it."""

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
    """A tool. `parameters`: the JSON schema of its arguments. `read`: parses their JSON text to typed keyword
    arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    read: Callable[[str], dict[str, Any]]
    function: Callable[..., Any]

    def as_json(self) -> dict[str, Any]:
        """Returns the tool in the format of chat templates and OpenAI's API."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": schema_for_prompt(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """The value of `gen(name, tools=...)`: the name of the tool, and its arguments as the function takes them."""

    name: str
    arguments: dict[str, Any]
    tool: Tool = field(repr=False, compare=False)


def make_tool(where: str, function: Any) -> Tool:
    """Returns `function` as a tool. Raises InputError if it has no name, or a parameter has no type."""
    name = getattr(function, "__name__", None)
    if not callable(function) or isinstance(function, type) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{where}: a tool must be a function whose name has letters and digits, not {function!r:.80}")
    description, parameter_docs = read_docstring(inspect.getdoc(function))
    arguments = _arguments_class(where, name, function)
    try:
        schema, read = json_schema_and_parser(arguments)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"{where}: the tool {name!r} cannot be described as a JSON schema: {error}") from None
    names = [argument.name for argument in dataclasses.fields(arguments)]

    def keywords(text: str) -> dict[str, Any]:
        value = read(text)
        return {name: getattr(value, name) for name in names}

    return Tool(name, description, _inline_root(schema, parameter_docs), keywords, function)


def make_tools(where: str, functions: object) -> tuple[Tool, ...]:
    """Returns a list of functions as tools. Raises InputError for an invalid function or a name that occurs twice."""
    if isinstance(functions, (str, bytes)) or not isinstance(functions, Iterable):
        raise InputError(f"{where}: tools must be a list of functions, not {functions!r:.80}")
    tools = tuple(make_tool(where, function) for function in functions)
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InputError(f"{where}: there must be 1 to {MAX_TOOLS} tools, not {len(tools)}")
    names = [tool.name for tool in tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(f"{where}: two tools are named {duplicate!r}")
    return tools


def call_schema(tools: Iterable[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of `tools`: an object with these two keys."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        without_definitions = {key: value for key, value in tool.parameters.items() if key != "$defs"}
        arguments = _prefix_refs(without_definitions, tool.name)
        for name, definition in tool.parameters.get("$defs", {}).items():
            definitions[f"{tool.name}.{name}"] = _prefix_refs(definition, tool.name)
        calls.append(
            {
                "type": "object",
                "properties": {name_key: {"const": tool.name}, arguments_key: arguments},
                "required": [name_key, arguments_key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | ({"$defs": definitions} if definitions else {})


def read_call(text: str, tools: Iterable[Tool], name_key: str, arguments_key: str) -> ToolCall:
    """Parses the call in `text`. Raises ValueError if its arguments are not valid for the function."""
    call = json.loads(text)
    tool = next(tool for tool in tools if tool.name == call[name_key])
    return ToolCall(tool.name, tool.read(json.dumps(call[arguments_key])), tool)


def _arguments_class(where: str, name: str, function: Callable[..., Any]) -> type:
    """Returns a dataclass with the function's parameters as fields."""
    try:
        signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"{where}: the types of the tool {name!r} cannot be read: {error}") from None
    fields: list[Any] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"{where}: parameter {parameter.name!r} of the tool {name!r} cannot be passed by keyword")
        if parameter.name not in hints:
            raise InputError(f"{where}: parameter {parameter.name!r} of the tool {name!r} needs a type annotation")
        fields.append((parameter.name, hints[parameter.name], _field(parameter)))
    return dataclasses.make_dataclass(f"{name}_arguments", fields)


def _field(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return dataclasses.field(kw_only=True)
    # a factory, so that the default may be any object and is not part of the schema
    return dataclasses.field(kw_only=True, default_factory=lambda: parameter.default)


def _inline_root(schema: dict[str, Any], parameter_docs: dict[str, str]) -> dict[str, Any]:
    """Returns `schema` with the object of the arguments at its root, and with the docstring's descriptions."""
    definitions = dict(schema.get("$defs", {}))
    root = schema
    if "$ref" in schema:
        root = definitions.pop(schema["$ref"].rpartition("/")[2])
    properties = {
        name: value_schema | ({"description": parameter_docs[name]} if name in parameter_docs else {})
        for name, value_schema in root.get("properties", {}).items()
    }
    inlined = {"type": "object", "properties": properties, "required": root.get("required", [])}
    return inlined | {"additionalProperties": False} | ({"$defs": definitions} if definitions else {})


def _prefix_refs(schema: Any, prefix: str) -> Any:
    """Returns `schema` with the names of referenced definitions prefixed by `prefix`."""
    if isinstance(schema, list):
        return [_prefix_refs(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rewritten = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#/$defs/"):
            rewritten[key] = f"#/$defs/{prefix}.{value.removeprefix('#/$defs/')}"
        else:
            rewritten[key] = _prefix_refs(value, prefix)
    return rewritten
