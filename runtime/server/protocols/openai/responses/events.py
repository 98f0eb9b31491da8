"""The events of a streamed response, as structs. Fields are encoded in the order in which they are declared.

`sequence_number` counts the events of a stream; `responses.py` sets it when it encodes them.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.server.protocols.openai.responses.response_object import AnyOutput, ContentPart, ResponseBody
from plait.runtime.server.protocols.shared import ContentLogprob


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The response object, at the beginning of a stream and at its end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseBody
    sequence_number: int = 0


class ItemEvent(msgspec.Struct, kw_only=True):
    """The beginning or the end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: AnyOutput
    sequence_number: int = 0


class PartEvent(msgspec.Struct, kw_only=True):
    """The beginning or the end of an item's only content part."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    part: ContentPart
    sequence_number: int = 0


class TextDelta(msgspec.Struct, kw_only=True):
    """New text of a content part. Only a message has `logprobs`."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    delta: str
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class TextDone(msgspec.Struct, kw_only=True):
    """The complete text of a content part. Only a message has `logprobs`."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    text: str
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class CallDelta(msgspec.Struct, kw_only=True):
    """A new piece of a call's arguments, or of a custom tool's input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class CallDone(msgspec.Struct, kw_only=True):
    """The complete arguments of a call, with its tool's name, or the complete input of a custom tool."""

    type: Literal["response.function_call_arguments.done", "response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    sequence_number: int = 0


Event = ResponseEvent | ItemEvent | PartEvent | TextDelta | TextDone | CallDelta | CallDone
