"""How a model writes tool calls and reads tool results: in the syntax of its chat template, or in a default syntax.

The default syntax, for templates without tools and for text without turns, is that of many open models:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A result is a user turn, or inside an open turn a line: `Result of add: 3`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.lang.tools.tool import Tool
    from plait.runtime.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True)
class ToolCallSyntax:
    """A call is `begin`, a JSON object with these two keys, `end`. `from_template`: found in the chat template."""

    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    from_template: bool = False


DEFAULT_CALL_SYNTAX = ToolCallSyntax("<tool_call>\n", "\n</tool_call>")
_NAME, _KEY, _VALUE, _USER, _SYSTEM = "Qznamez", "Qzkeyz", "Qzvaluez", "Qzuserz", "Qzsystemz"


@lru_cache(maxsize=64)
def detect_call_syntax(template: ChatTemplate | None) -> ToolCallSyntax:
    """Returns the syntax in which a chat template writes calls, found by rendering a call with it."""
    if template is None or "tool_calls" not in template.source:
        return DEFAULT_CALL_SYNTAX
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    call = {"type": "function", "id": "call00000", "function": function}
    user = {"role": "user", "content": _USER}
    try:
        before = template.render([user], add_generation_prompt=True)
        rendered = template.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
        suffix = template.turn_suffix(["user"], "assistant")
    except PlaitError:
        return DEFAULT_CALL_SYNTAX
    if not rendered.startswith(before) or not rendered.endswith(suffix):
        return DEFAULT_CALL_SYNTAX
    return _parse_call_syntax(rendered[len(before) : len(rendered) - len(suffix)])


def _parse_call_syntax(text: str) -> ToolCallSyntax:
    """Returns the syntax of `text`, a call of _NAME; the default if it is not an object with a name and arguments."""
    start = text.find("{")
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            start = text.find("{", start + 1)
            continue
        keys = {json.dumps(item): key for key, item in value.items()}
        name_key, arguments_key = keys.get(json.dumps(_NAME)), keys.get(json.dumps({_KEY: _VALUE}))
        if len(value) != 2 or name_key is None or arguments_key is None:
            return DEFAULT_CALL_SYNTAX
        return ToolCallSyntax(text[:start], text[end:], name_key, arguments_key, from_template=True)
    return DEFAULT_CALL_SYNTAX


def has_tool_turns(template: ChatTemplate) -> bool:
    """Whether the template mentions the role "tool". Many templates render any role name, known to the model or not."""
    return "'tool'" in template.source or '"tool"' in template.source


def template_system_turn(template: ChatTemplate, tools: Iterable[Tool]) -> tuple[str, str] | None:
    """Returns the template's text before and after the content of a first system turn that lists `tools`; None if the
    template does not list tools there."""
    if "tools" not in template.source:
        return None
    message = {"role": "system", "content": _SYSTEM}
    try:
        without_tools = template.render([message])
        with_tools = template.render([message], tools=[tool.as_json() for tool in tools])
    except PlaitError:
        return None
    if with_tools == without_tools or with_tools.count(_SYSTEM) != 1:
        return None
    before, _, after = with_tools.partition(_SYSTEM)
    return before, after


def default_tool_listing(tools: Iterable[Tool], syntax: ToolCallSyntax) -> str:
    """Returns the list of `tools` for a system turn: one JSON line per tool, and the syntax of a call."""
    lines = [json.dumps(tool.as_json()["function"], ensure_ascii=False) for tool in tools]
    shape = f'{{"{syntax.name_key}": "...", "{syntax.arguments_key}": {{...}}}}'
    return "\n".join(
        ["You can call these tools:", *lines, f"A call is written {syntax.begin}{shape}{syntax.end}"],
    )


def result_text(value: Any) -> str:
    """Returns a tool's result as the model reads it: text unchanged, anything else as JSON."""
    import msgspec

    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=_encode_unknown).decode()


def _encode_unknown(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # a Pydantic model
    return dump(mode="json") if callable(dump) else str(value)
