"""Messages and structured output for chat APIs: parses turns from the text of a session, and converts constraints.

A state writes turns through a chat template. The template here marks them with control characters, which count only in
text of the template, so that a session can tell turns from what users typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plait.constrained.specs import Choices, JsonObject, JsonSchema, Regex, Spec, Structural
from plait.lang.backends.remote_client import Part
from plait.lang.partial.streamed_json import StreamedJson
from plait.runtime.errors import CallFailed, InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate

_BEGIN, _MIDDLE, _END = "\x02", "\x03", "\x04"
_CALL = (
    "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}"
)
TURN_MARK_TEMPLATE = ChatTemplate(  # a tool call is a turn of its JSON alone, so that structured output can express it
    "{% for m in messages %}\x02{{ m.role }}\x03"
    "{% if m.tool_calls %}" + _CALL + "{% else %}{{ m.content }}{% endif %}\x04{% endfor %}"
    "{% if add_generation_prompt %}\x02assistant\x03{% endif %}",
    "",
    "",
)


def parse_messages(parts: Sequence[Part], name: str) -> tuple[list[dict[str, str]], str]:
    """Returns the finished turns, and the text of the open assistant turn. Raises CallFailed if none is open."""
    messages: list[dict[str, str]] = []
    role, content = None, ""
    for text, is_template_text in parts:
        if not is_template_text:
            if role is None:
                raise CallFailed(f"{name} needs turns: write text inside system(...), user(...) or assistant(...)")
            content += text
            continue
        for piece in _turn_marks(text):
            if piece == _END:
                messages.append({"role": str(role), "content": content})
                role, content = None, ""
            elif piece:
                role = piece
    if role != "assistant":
        raise CallFailed(f"{name} generates assistant turns only: write assistant(gen(...))")
    return messages, content


def _turn_marks(text: str) -> list[str]:
    """Returns the marks in a template's text: a role where a turn begins, _END where one ends."""
    pieces = text.replace(_END, f"{_BEGIN}{_END}{_MIDDLE}").split(_BEGIN)
    return [piece.removesuffix(_MIDDLE) for piece in pieces if piece]


@dataclass(frozen=True)
class StructuredOutput:
    """A JSON schema whose root is an object. `read` extracts the text of the value from a valid answer; `stream` passes
    on this text while the answer arrives, or is None for a value that is not JSON."""

    schema: dict[str, Any]
    read: Callable[[str], str]
    stream: Callable[[], StreamedJson] | None = StreamedJson


def to_structured_output(spec: Spec | None, name: str) -> StructuredOutput | None:
    """Returns the constraint as structured output. Raises InputError if that is not possible."""
    match spec:
        case None:
            return None
        case Choices(choices):
            return _wrapped({"type": "string", "enum": list(choices)}, is_text=True)
        case Regex(pattern):
            return _wrapped({"type": "string", "pattern": f"^(?:{pattern})$"}, is_text=True)
        case JsonObject(any_value=False):
            return StructuredOutput({"type": "object"}, _spaced)
        case JsonSchema():
            from plait.runtime.chat.json_calls import self_contained  # lazy: it loads the grammar libraries

            return _of_schema(json.loads(self_contained(spec)))
        case Structural():
            from plait.runtime.chat.json_calls import tool_calls

            calls = tool_calls(spec)
            call = calls.as_json() if calls is not None and calls.is_required else None
            if call is not None and not call.begin and not call.end:
                return replace(_of_schema(call.schema), stream=None)  # a service may write other white space
    raise InputError(f"{name} cannot express the constraint {type(spec).__name__} as structured output")


def _of_schema(schema: Any) -> StructuredOutput:
    is_object = isinstance(schema, dict) and schema.get("type") == "object" and "anyOf" not in schema
    return StructuredOutput(schema, _spaced) if is_object else _wrapped(schema, is_text=False)


def _wrapped(schema: Any, is_text: bool) -> StructuredOutput:
    definitions = schema.pop("$defs", None) if isinstance(schema, dict) else None
    root = {"type": "object", "properties": {"value": schema}, "required": ["value"], "additionalProperties": False}
    if definitions:
        root["$defs"] = definitions

    def read(text: str) -> str:
        value = json.loads(text)["value"]
        return str(value) if is_text else json.dumps(value, ensure_ascii=False)

    return StructuredOutput(root, read, None if is_text else partial(StreamedJson, is_wrapped=True))


def _spaced(text: str) -> str:
    return json.dumps(json.loads(text), ensure_ascii=False)
