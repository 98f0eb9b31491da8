"""Reasoning before an answer: one meaning for the fields of all protocols, and what it does to prompt and constraint.

    chat completions  reasoning_effort, reasoning          Anthropic  thinking, output_config.effort
    responses         reasoning.effort                     Ollama     think

All set the chat template's own variables, and a limit of tokens after which the end mark is forced. Where a model marks
no reasoning they are advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.constrained.specs import Reasoning, Regex, Spec
from plait.runtime.chat.formats.reasoning_format import GENERIC_REASONING, ReasoningFormat
from plait.runtime.server.chat.conversation import Conversation, Effort, Thinking
from plait.runtime.server.chat.template_settings import THINKING
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.tokenizer.chat_template import ChatTemplate

EFFORT_TOKENS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16_384, "xhigh": 32_768, "max": 65_536}
FREE_TEXT = Regex(r"(?s:.*)")


def thinking_of(param: str, effort: Effort | None, max_tokens: int | None = None, **options: bool) -> Thinking:
    """The reasoning that a request asks for. `max_tokens`: instead of the effort's. Without either: any amount.

    >>> thinking_of("reasoning_effort", "low").max_tokens, thinking_of("reasoning_effort", "none").is_wanted
    (1024, False)
    """
    if effort is not None and max_tokens is None:
        max_tokens = EFFORT_TOKENS.get(effort)
    return Thinking(param, effort != "none", max_tokens, effort, **options)


def with_thinking(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """The conversation with what its reasoning means for the variables of `template`.

    Those that the template does not read are left out, and a variable in the request has priority. `enable_thinking`
    is a wish like the others where the template does not read it: clients send it to all models.
    """
    given, thinking = dict(conversation.template_variables), conversation.thinking
    has_switch, switch = THINKING in template.variable_names, given.get(THINKING)
    if switch is False or (switch is True and not has_switch):
        thinking = replace(thinking, param=thinking.param or THINKING, is_wanted=switch)
    if isinstance(switch, bool) and not has_switch:
        del given[THINKING]
    wished = {THINKING: thinking.is_wanted, "thinking": thinking.is_wanted, "reasoning_effort": thinking.effort}
    variables: dict[str, Any] = {
        name: value for name, value in wished.items() if value is not None and name in template.variable_names
    }
    return replace(conversation, thinking=thinking, template_variables=variables | given)


def reasoning_marks(own: ReasoningFormat | None, thinking: Thinking, constraint: Spec | None) -> ReasoningFormat | None:
    """The marks of reasoning in the answer. `own`: those of the template; without them, adds a warning."""
    if own is not None or not thinking.is_wanted:
        return own
    if thinking.is_constrained and constraint is not None:
        return GENERIC_REASONING
    warn(thinking.param, "this model does not mark reasoning")
    return None


def after_reasoning(
    constraint: Spec | None,
    thinking: Thinking,
    marks: ReasoningFormat | None,
    is_open: bool,
    control_tokens: Sequence[tuple[str, int]] = (),
    text_head: str = "",
) -> Spec | None:
    """The constraint on an answer that follows reasoning. `is_open`: the prompt ends with the opening mark.

    control_tokens: the texts and ids of those in the marks. text_head: what begins the message of the answer's text.
    """
    is_needed = thinking.max_tokens is not None or (thinking.is_constrained and constraint is not None)
    if marks is None or not thinking.is_wanted or not is_needed or isinstance(constraint, Reasoning):
        return constraint
    begin = "" if is_open else marks.begin
    separator = marks.separator + text_head
    whole = begin + marks.end + separator
    return Reasoning(
        FREE_TEXT if constraint is None else constraint,
        begin,
        marks.end,
        separator,
        thinking.max_tokens,
        marks.lead,
        tuple((text, token) for text, token in control_tokens if text in whole),
    )
