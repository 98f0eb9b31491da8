"""Makes tools: of a typed Python function, from its name, its docstring and its signature; and those of a list, which
may hold functions, `Tool` objects, and dicts in OpenAI's format."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, get_type_hints

from plait.lang.tools.tool import TOOL_NAME, Tool, tool_from_json
from plait.lang.typed.value_format import json_schema_and_parser
from plait.runtime.errors import InputError


def function_tool(where: str, function: Any) -> Tool:
    """Returns `function` as a tool. Raises InputError if it has no name, or a parameter has no type."""
    name = getattr(function, "__name__", None)
    is_function = callable(function) and not isinstance(function, type)
    if not is_function or not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
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

    return Tool(name, description, _inline_root(schema, parameter_docs), function, strict=True, read=keywords)


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


# -- docstring ------------------------------------------------------------------------------------
# Parses the docstring of a tool: its description and its parameters, in Google, NumPy or Sphinx style.

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE
)
_PARAMETERS = re.compile(r"(args|arguments|parameters|params):?\s*$", re.IGNORECASE)
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")
_GOOGLE = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NUMPY = re.compile(r"(\w+)\s*(?::.*)?$")


def read_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Returns (description of the function, {parameter: description}).

    >>> read_docstring("Adds.\\n\\nArgs:\\n    a: the first\\n")
    ('Adds.', {'a': 'the first'})
    """
    lines = inspect.cleandoc(text or "").splitlines()
    start = next((i for i, line in enumerate(lines) if _SECTION.match(line) or line.startswith(":")), len(lines))
    return " ".join(" ".join(lines[:start]).split()), _parameters(lines[start:])


def _parameters(lines: list[str]) -> dict[str, str]:
    descriptions: dict[str, str] = {}
    name, inside = "", False  # the current parameter; whether the line is in a section on parameters
    for line in lines:
        sphinx = _SPHINX.match(line)
        if sphinx:
            name, descriptions[sphinx[1]] = sphinx[1], sphinx[2]
        elif _SECTION.match(line):
            name, inside = "", _PARAMETERS.match(line) is not None
        elif inside and line.strip(" -"):
            name = _parameter(line, name, descriptions)
        elif line.startswith(":"):
            name = ""
        elif name and line.startswith(" "):
            descriptions[name] += f" {line.strip()}"
    return {name: " ".join(text.split()) for name, text in descriptions.items() if text.strip()}


def _parameter(line: str, name: str, descriptions: dict[str, str]) -> str:
    """Reads a line of a section on parameters: a new parameter, or more text of parameter `name`. Returns the name of
    the parameter that the line belongs to."""
    depth = len(line) - len(line.lstrip())
    head = _GOOGLE.match(line.strip()) if depth else _NUMPY.match(line)
    if head and (depth <= 4 or not name):
        if depth and name and not head[2] and name in descriptions:
            descriptions[name] += f" {line.strip()}"
            return name
        descriptions[head[1]] = head[2] if depth else ""
        return head[1]
    if name:
        descriptions[name] += f" {line.strip()}"
    return name


ToolSource: TypeAlias = Callable[..., Any] | Tool | Mapping[str, Any]
MAX_TOOLS = 128


def make_tool(where: str, source: object) -> Tool:
    """Returns one item of a list of tools as a tool. Raises InputError, beginning with `where`, for an invalid one."""
    if isinstance(source, Tool):
        return source
    return tool_from_json(where, source) if isinstance(source, Mapping) else function_tool(where, source)


def make_tools(where: str, sources: object) -> tuple[Tool, ...]:
    """Returns a list of tools. Raises InputError for an invalid tool or a name that occurs twice."""
    if isinstance(sources, (str, bytes, Mapping, Tool)) or not isinstance(sources, Iterable):
        raise InputError(f"{where}: tools must be a list of functions or Tool objects, not {sources!r:.80}")
    tools = tuple(make_tool(where, source) for source in sources)
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InputError(f"{where}: there must be 1 to {MAX_TOOLS} tools, not {len(tools)}")
    names = [tool.name for tool in tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(f"{where}: two tools are named {duplicate!r}")
    return tools
