"""Call formats that a chat template does not show, and the generic formats of templates without tools.

A template without tools gets instructions for the generic format in the system turn, or in the first user turn.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.chat.formats.call_format import CallFormat, KeywordArguments

GENERIC_FORMAT = CallFormat('{"tool_call": {"name": "{name}", "arguments": ', "}}", is_native=False)
# used where the answer itself may be JSON, and by programs
GENERIC_FORMAT_BESIDE_JSON = CallFormat(
    '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", is_native=False
)


class FormatException(NamedTuple):
    """The format of templates whose source contains all of `marks`.

    texts: further texts of MessageFormat. is_shown_wrong: the template writes calls otherwise than the model, so
    nothing is derived from it; the others apply where nothing can be derived.
    """

    marks: tuple[str, ...]
    calls: CallFormat
    texts: tuple[str, ...] = ()
    is_shown_wrong: bool = False


_PYTHONIC = CallFormat(
    "{name}(", ")", KeywordArguments(), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", writes_calls=False
)
EXCEPTIONS = (
    # gpt-oss: reasoning, text and calls are messages of channels, and the prompt ends within the head of the first one.
    # Source: "OpenAI Harmony Response Format", cookbook.openai.com/articles/openai-harmony.
    FormatException(
        ("<|channel|>analysis<|message|>", "<|channel|>commentary"),
        CallFormat(
            "to=functions.{name}<|channel|>commentary json<|message|>",
            "",
            lead=" ",
            is_single=True,
            other_heads=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",),
        ),
        ("<|channel|>commentary<|message|>",),
        is_shown_wrong=True,
    ),
    # Granite 3 lists tools and writes no calls. Source: the instructions in the template.
    FormatException(
        ("<|tool_call|> followed by a JSON list",),
        CallFormat(
            '{"name": "{name}", "arguments": ', "}", begin="<|tool_call|>[", separator=", ", end="]", writes_calls=False
        ),
    ),
    # SmolLM3. Source: the instructions in the template with tools, huggingface.co/HuggingFaceTB/SmolLM3-3B; some copies
    # of it list no tools.
    FormatException(
        ("named SmolLM", "Reasoning Mode: "),
        CallFormat(
            '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n", writes_calls=False
        ),
    ),
    # LFM2 lists tools and writes no calls. Source: docs.liquid.ai/lfm/key-concepts/tool-use.
    FormatException(("<|tool_list_start|>",), _PYTHONIC),
    FormatException(("List of tools: [", "<|im_start|>"), _PYTHONIC),
)


def exception_of(source: str) -> FormatException | None:
    """Returns the exception that applies to a template."""
    return next((entry for entry in EXCEPTIONS if all(mark in source for mark in entry.marks)), None)
