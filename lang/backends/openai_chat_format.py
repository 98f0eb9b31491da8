"""The JSON of OpenAI's chat completions: builds the request body and parses the stream of chunks.

Source: https://platform.openai.com/docs/api-reference/chat. Compatible servers use the same format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from plait.lang.backends.chat_client import TurnEnd, TurnRequest, changed_params
from plait.lang.tools.call_format import CALL_END_MARKER
from plait.runtime.call_reports import Usage
from plait.runtime.errors import CallFailed

if TYPE_CHECKING:
    from plait.runtime.chat.json_calls import ToolCalls

PROTOCOL = "openai_client"


def chat_body(model: str, request: TurnRequest, limit: str = "max_tokens") -> dict[str, Any]:
    """Returns the body of a streaming request. `limit`: this service's name for max_tokens."""
    params = request.params
    body: dict[str, Any] = {
        "model": model,
        "messages": request.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        limit: params.max_tokens,
    }
    body |= changed_params(params, PROTOCOL)
    if request.tools is not None:
        body["tools"] = [{"type": "function", "function": function} for function in request.tools.functions]
        body |= {"tool_choice": "auto", "parallel_tool_calls": False}
    elif params.stop:
        body["stop"] = list(params.stop)
    if request.begun:
        body["messages"] = [*request.messages, {"role": "assistant", "content": request.begun}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    if request.output_format is not None:
        schema = {"name": "value", "schema": request.output_format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def parse_turn(chunks: Iterable[dict[str, Any]], tools: ToolCalls | None = None) -> Iterator[str | TurnEnd]:
    """Yields the text of the turn in pieces, then its TurnEnd. A call of one of `tools` becomes text.

    Raises CallFailed for a refusal.
    """
    reason, usage, called, arguments = None, Usage(), "", ""
    for chunk in chunks:
        usage = _usage(chunk.get("usage")) or usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("refusal"):
                raise CallFailed(f"the model refused to answer: {delta['refusal'][:200]}")
            reason = choice.get("finish_reason") or reason
            yield delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                function = part.get("function") or {}
                if not part.get("index"):  # the first call; only one is read
                    called += function.get("name") or ""
                    arguments += function.get("arguments") or ""
    if tools is not None and called:
        yield tools.render_json(called, arguments).removesuffix(CALL_END_MARKER)
    yield TurnEnd("stop" if reason == "tool_calls" and tools is not None else reason, usage)


def _usage(counts: dict[str, Any] | None) -> Usage | None:
    if not counts:
        return None
    prompt = int(counts.get("prompt_tokens") or 0)
    cached = int((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Usage(prompt, cached, prompt - cached, 0, int(counts.get("completion_tokens") or 0))
