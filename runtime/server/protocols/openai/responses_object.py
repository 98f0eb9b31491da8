"""OpenAI's response object.

Source: https://platform.openai.com/docs/api-reference/responses/object.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from plait.runtime.messages import Usage


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponseUsage:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        details = InputTokensDetails(usage.cached_tokens, prompt - usage.cached_tokens)
        return cls(prompt, details, completion, OutputTokensDetails(reasoning_tokens), prompt + completion)


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: None = None
    summary: None = None


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """OpenAI's response object. `output` has items of type message, reasoning and function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"] = "in_progress"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    service_tier: str = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
