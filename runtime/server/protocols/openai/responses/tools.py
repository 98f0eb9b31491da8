"""The tools of a `/v1/responses` request: functions, custom tools, and both within namespaces.

The model sees a tool of a namespace as `namespace.name`; items and events have the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.runtime.server.chat.conversation import ToolDefinition
from plait.runtime.server.errors import invalid
from plait.runtime.server.protocols.openai.custom_tools import GrammarInput, custom_tool
from plait.runtime.server.protocols.openai.responses import types
from plait.runtime.server.protocols.shared import checked_tool_names, distinct_tools, tool_definition, unnamed_choice


@dataclass(frozen=True)
class CalledTool:
    """What a call's item says of its tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True)
class ToolTable:
    """The tools of a request. called: the name that the model writes -> the tool."""

    definitions: tuple[ToolDefinition, ...] = ()
    called: Mapping[str, CalledTool] = field(default_factory=dict)


def qualified(name: str, namespace: str | None) -> str:
    """The name that the model writes.

    >>> qualified("find", "crm")
    'crm.find'
    """
    return f"{namespace}.{name}" if namespace else name


def read_tools(lists: Iterable[tuple[str, Sequence[types.Tool]]]) -> ToolTable:
    """The tools of several lists, each with its JSON path. Raises ApiError 400."""
    found = [
        item
        for path, tools in lists
        for index, tool in enumerate(tools)
        for item in _definitions(tool, f"{path}[{index}]")
    ]
    if len(found) > types.MAX_TOOLS:
        raise invalid(f"there are {len(found)} tools, those of namespaces counted; at most {types.MAX_TOOLS}", "tools")
    definitions = distinct_tools((place, definition) for place, definition, _ in found)
    return ToolTable(definitions, {definition.name: called for _, definition, called in found})


def _definitions(tool: types.Tool, place: str) -> Iterator[tuple[str, ToolDefinition, CalledTool]]:
    """Yields (place, definition, what its calls are) of a tool, or of the tools of a namespace."""
    if not isinstance(tool, types.NamespaceTool):
        yield place, _definition(tool, place), CalledTool(tool.name, None, isinstance(tool, types.CustomTool))
        return
    for index, inner in enumerate(tool.tools):
        definition = _definition(inner, f"{place}.tools[{index}]")
        # The namespace's description stands once, at its first tool.
        texts = (tool.description if not index else None, definition.description)
        definition = replace(
            definition, name=qualified(inner.name, tool.name), description="\n".join(filter(None, texts))
        )
        called = CalledTool(inner.name, tool.name, isinstance(inner, types.CustomTool))
        yield f"{place}.tools[{index}]", definition, called


def _definition(tool: types.FunctionTool | types.CustomTool, place: str) -> ToolDefinition:
    if isinstance(tool, types.FunctionTool):
        return tool_definition(tool, place)
    grammar = tool.format if isinstance(tool.format, GrammarInput) else None
    return custom_tool(tool.name, tool.description, grammar, f"{place}.format")


def tool_choice(body: types.ResponsePrompt, tools: ToolTable) -> tuple[frozenset[str] | None, bool, bool]:
    """(names of tools that may be called, None for all; whether a call is required; whether only one is allowed)"""
    choice = body.tool_choice
    if tools.definitions and isinstance(choice, types.NamedToolChoice | types.NamedCustomChoice):
        return _chosen([choice], tools, "tool_choice.name"), True, True
    if tools.definitions and isinstance(choice, types.AllowedToolsChoice):
        return _chosen(choice.tools, tools, "tool_choice.tools"), choice.mode == "required", False
    return unnamed_choice(choice, has_tools=bool(tools.definitions))


def _chosen(
    choices: Sequence[types.NamedToolChoice | types.NamedCustomChoice], tools: ToolTable, param: str
) -> frozenset[str]:
    """The tools that choices name: a name without a namespace also means tools of that name in every namespace."""
    names: list[str] = []
    for choice in choices:
        name = qualified(choice.name, choice.namespace)
        same = [whole for whole, tool in tools.called.items() if choice.namespace is None and tool.name == name]
        names += [name] if name in tools.called else same or [name]
    return checked_tool_names(names, tools.definitions, param)
