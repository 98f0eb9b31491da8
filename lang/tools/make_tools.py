"""Makes the tools of a list: typed functions, `Tool` objects, and dicts in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from plait.lang.tools.function_tool import function_tool
from plait.lang.tools.tool import Tool, tool_from_json
from plait.runtime.errors import InputError

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
