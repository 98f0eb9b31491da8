"""The constraint on an answer that may call tools: from a conversation, with the errors of its request."""

from __future__ import annotations

from collections.abc import Sequence

from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Structural
from plait.runtime.chat.call_constraint import CallableTool, ToolError, call_constraint
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.server.chat.conversation import Conversation
from plait.runtime.server.errors import ToolParams, invalid


def tool_constraint(
    call_format: CallFormat,
    conversation: Conversation,
    control_tokens: Sequence[tuple[str, int]] = (),
    free_tokens: Sequence[str] = (),
    text_head: str = "",
) -> Structural:
    """Returns the constraint of an answer that may call tools.

    It allows free text with valid calls; with `must_call` only calls; with a JSON constraint either calls or a JSON
    answer that satisfies it. The other parameters are those of `call_constraint`. Raises ApiError for an invalid
    schema, and for a constraint that is not JSON.
    """
    tools = conversation.callable_tools
    try:
        return call_constraint(
            call_format,
            [CallableTool(tool.name, tool.parameters, tool.strict, tool.input) for tool in tools],
            must_call=conversation.must_call,
            one_call=conversation.one_call,
            otherwise=json_answer_constraint(conversation),
            strict_formats=conversation.strict_formats,
            num_earlier=sum(len(turn.calls) for turn in conversation.turns),
            control_tokens=control_tokens,
            free_tokens=free_tokens,
            text_head=text_head,
        )
    except ToolError as error:
        param = tools[error.index].param
        raise invalid(f"'{param}': {error}", param, "invalid_constraint") from None
    except GrammarError as error:  # two tools of one name, or more tools than a constraint may have
        raise invalid(f"'tools': {error}", "tools", "invalid_constraint") from None


def tool_params(constraint: Structural, conversation: Conversation) -> ToolParams:
    """Returns the parameters of the request that a constraint of `tool_constraint` came from. A tool has a trigger for
    each form of the head of its calls."""
    tools = conversation.callable_tools
    num_heads = len(constraint.triggers) // len(tools)
    return ToolParams([tool.param for tool in tools for _ in range(num_heads)], conversation.constraint_param)


def json_answer_constraint(conversation: Conversation) -> JsonSchema | JsonObject | None:
    """Returns the constraint of an answer without calls, if tools may be called; None for free text and `must_call`.

    Raises ApiError for a constraint that is not JSON.
    """
    constraint, param = conversation.constraint, conversation.constraint_param
    if constraint is None or conversation.must_call or not conversation.callable_tools:
        return None
    if isinstance(constraint, JsonSchema | JsonObject):
        return constraint
    text = f"'{param}' cannot constrain an answer that may call tools; set 'tool_choice' to 'none' or 'required'"
    raise invalid(text, param, "unsupported_combination")
