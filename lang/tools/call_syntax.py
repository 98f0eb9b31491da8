"""How a model writes calls and reads results: as its own chat template has it, or in a plain form.

The plain form, where a template knows no tools (or there are no turns), is that of many open models:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

and a result is a user turn, or inside an open turn a line of its own: `Result of add: 3`.
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
    """A call is `begin`, a JSON object with these two keys, `end`. `from_template`: the chat template says so."""

    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    from_template: bool = False


DEFAULT_CALL_SYNTAX = ToolCallSyntax("<tool_call>\n", "\n</tool_call>")
_NAME, _KEY, _VALUE, _USER, _SYSTEM = "Qznamez", "Qzkeyz", "Qzvaluez", "Qzuserz", "Qzsystemz"


@lru_cache(maxsize=64)
def detect_call_syntax(template: ChatTemplate | None) -> ToolCallSyntax:
    """How this template writes a call, found by rendering one."""
    if template is None or "tool_calls" not in template.source:
        return DEFAULT_CALL_SYNTAX
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    call = {"type": "function", "id": "call00000", "function": function}
    user = {"role": "user", "content": _USER}
    try:
        before = template.render([user], add_generation_prompt=True)
        whole = template.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
        suffix = template.turn_suffix(["user"], "assistant")
    except PlaitError:
        return DEFAULT_CALL_SYNTAX
    if not whole.startswith(before) or not whole.endswith(suffix):
        return DEFAULT_CALL_SYNTAX
    return _parse_call_syntax(whole[len(before) : len(whole) - len(suffix)])


def _parse_call_syntax(text: str) -> ToolCallSyntax:
    """The wording whose call of _NAME is `text`; PLAIN where that is no object of name and arguments."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        keys = {json.dumps(each): key for key, each in value.items()}
        name_key, arguments_key = keys.get(json.dumps(_NAME)), keys.get(json.dumps({_KEY: _VALUE}))
        if len(value) != 2 or name_key is None or arguments_key is None:
            return DEFAULT_CALL_SYNTAX
        return ToolCallSyntax(text[:at], text[end:], name_key, arguments_key, from_template=True)
    return DEFAULT_CALL_SYNTAX


def has_tool_turns(template: ChatTemplate) -> bool:
    """Whether the template knows turns of the role "tool" (many write any role's name, known to the model or not)."""
    return "'tool'" in template.source or '"tool"' in template.source


def template_system_turn(template: ChatTemplate, tools: Iterable[Tool]) -> tuple[str, str] | None:
    """The template's text before and after the content of a first system turn that lists `tools`, if it can."""
    if "tools" not in template.source:
        return None
    message = {"role": "system", "content": _SYSTEM}
    try:
        without = template.render([message])
        whole = template.render([message], tools=[tool.as_json() for tool in tools])
    except PlaitError:
        return None
    if whole == without or whole.count(_SYSTEM) != 1:
        return None
    before, _, after = whole.partition(_SYSTEM)
    return before, after


def default_tool_listing(tools: Iterable[Tool], syntax: ToolCallSyntax) -> str:
    """What a system turn says of `tools`: one JSON line for each, and how a call is written."""
    lines = [json.dumps(tool.as_json()["function"], ensure_ascii=False) for tool in tools]
    shape = f'{{"{syntax.name_key}": "...", "{syntax.arguments_key}": {{...}}}}'
    return "\n".join(
        ["You can call these tools:", *lines, f"A call is written {syntax.begin}{shape}{syntax.end}"],
    )


def result_text(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    import msgspec

    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=_encode_unknown).decode()


def _encode_unknown(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # a Pydantic model
    return dump(mode="json") if callable(dump) else str(value)
