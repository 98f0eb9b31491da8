"""Call formats that a chat template does not show, and the generic formats of templates without tools.

A template without tools gets instructions for the generic format in the system turn, or in the first user turn.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.server.chat.call_format import CallFormat, KeywordArguments
from plait.runtime.server.chat.reasoning_format import ReasoningFormat

GENERIC_FORMAT = CallFormat('{"tool_call": {"name": "{name}", "arguments": ', "}}", is_native=False)
# used where the answer itself may be JSON
GENERIC_FORMAT_BESIDE_JSON = CallFormat('<tool_call>{"name": "{name}", "arguments": ', "}</tool_call>", is_native=False)
_NAMED = '{"name": "{name}", "arguments": '


class FormatException(NamedTuple):
    """The formats of templates whose source contains all of `marks`. calls: None for the generic format."""

    marks: tuple[str, ...]
    calls: CallFormat | None
    reasoning: ReasoningFormat | None = None


EXCEPTIONS = (
    # gpt-oss: the template writes reasoning and calls as messages of channels. Source: "OpenAI Harmony Response Format"
    # (cookbook.openai.com/articles/openai-harmony).
    FormatException(
        ("<|channel|>analysis<|message|>", " to=functions."),
        CallFormat(" to=functions.{name}<|channel|>commentary json<|message|>", "", is_single=True),
        ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", "thinking"),
    ),
    # Granite 3: tools are listed, calls are not written. Source: the template's own instructions.
    FormatException(
        ("<|tool_call|> followed by a JSON list",),
        CallFormat(_NAMED, "}", begin="<|tool_call|>[", separator=", ", end="]", writes_calls=False),
    ),
    # LFM2: tools are listed, calls are not written. Source: docs.liquid.ai/lfm/key-concepts/tool-use.
    FormatException(
        ("<|tool_list_start|>",),
        CallFormat(
            "{name}(", ")", KeywordArguments(), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", writes_calls=False
        ),
    ),
    FormatException(
        ("List of tools: [", "<|im_start|>"),
        CallFormat(
            "{name}(", ")", KeywordArguments(), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", writes_calls=False
        ),
    ),
)


def exception_of(source: str) -> FormatException | None:
    """Returns the exception that applies to a template."""
    return next((entry for entry in EXCEPTIONS if all(mark in source for mark in entry.marks)), None)
