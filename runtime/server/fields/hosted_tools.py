"""Tools that OpenAI's and Anthropic's servers run themselves: left out of a request that has other tools to use.

Without other tools, or where `tool_choice` names one of them, the answer would be another one: then they are refused as
any type of tool that is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from plait.runtime.server.fields.request_warnings import warn

_HOSTED = {
    "responses": r"(web_search(_preview)?|code_interpreter|image_generation|tool_search)(_\d{4}_\d\d_\d\d)?",
    "messages": r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))(_\d{8})?",
}
_HOSTED |= {"count_tokens": _HOSTED["messages"], "input_tokens": _HOSTED["responses"]}


def leave_out_hosted_tools(body: dict[str, Any], endpoint: str) -> None:
    """Removes hosted tools from the lists of `body`, in place, with a warning for each. Raises ApiError 400 with strict
    fields."""
    if (pattern := _HOSTED.get(endpoint)) is None:
        return
    lists = list(_tool_lists(body))
    hosted = {
        f"{place}[{index}]": tool
        for place, holder in lists
        for index, tool in enumerate(holder["tools"])
        if re.fullmatch(pattern, _text(tool, "type"))
    }
    names = {_text(tool, key) for tool in hosted.values() for key in ("type", "name")} - {""}
    choice = body.get("tool_choice")
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    chosen = [choice, *(allowed if isinstance(allowed, list) else ())]
    if len(hosted) == sum(len(holder["tools"]) for _, holder in lists):
        return
    if any(_text(tool, key) in names for tool in chosen for key in ("type", "name")):
        return
    for place, tool in hosted.items():
        warn(place, f"{_text(tool, 'type')} does not run here")
    for place, holder in lists:
        kept = [tool for index, tool in enumerate(holder["tools"]) if f"{place}[{index}]" not in hosted]
        holder["tools"] = kept


def _tool_lists(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place of each list of tools, and the object that holds it as `tools`: the body, and items of
    `/v1/responses`."""
    items = body.get("input")
    holders = [("tools", body)]
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if _text(item, "type") == "additional_tools":
            holders.append((f"input[{index}].tools", item))
    yield from ((place, holder) for place, holder in holders if isinstance(holder.get("tools"), list))


def _text(tool: Any, key: str) -> str:
    value = tool.get(key) if isinstance(tool, dict) else None
    return value if isinstance(value, str) else ""
