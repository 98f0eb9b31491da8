"""Tools that OpenAI's and Anthropic's servers run themselves: left out of a request that has other tools to use.

Without other tools, or where `tool_choice` names one of them, the answer would be another one: then they are refused as
any type of tool that is not known.
"""

from __future__ import annotations

import re
from typing import Any

from plait.runtime.server.request_warnings import warn

_HOSTED = {
    "responses": r"(web_search(_preview)?|code_interpreter|image_generation|tool_search)(_\d{4}_\d\d_\d\d)?",
    "messages": r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))(_\d{8})?",
}
_HOSTED |= {"count_tokens": _HOSTED["messages"], "input_tokens": _HOSTED["responses"]}


def leave_out_hosted_tools(body: dict[str, Any], endpoint: str) -> None:
    """Removes hosted tools from `body`, in place, with a warning for each. Raises ApiError 400 with strict fields."""
    tools, pattern = body.get("tools"), _HOSTED.get(endpoint)
    if pattern is None or not isinstance(tools, list):
        return
    hosted = {index: tool for index, tool in enumerate(tools) if re.fullmatch(pattern, _text(tool, "type"))}
    names = {_text(tool, key) for tool in hosted.values() for key in ("type", "name")} - {""}
    choice = body.get("tool_choice")
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    chosen = [choice, *(allowed if isinstance(allowed, list) else ())]
    if len(hosted) == len(tools) or any(_text(tool, key) in names for tool in chosen for key in ("type", "name")):
        return
    for index, tool in hosted.items():
        warn(f"tools[{index}]", f"{_text(tool, 'type')} does not run here")
    body["tools"] = [tool for index, tool in enumerate(tools) if index not in hosted]


def _text(tool: Any, key: str) -> str:
    value = tool.get(key) if isinstance(tool, dict) else None
    return value if isinstance(value, str) else ""
