"""Further variables of the chat template, such as `enable_thinking`, as the requests of each protocol give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from plait.runtime.client.client import Client
from plait.runtime.server.chat.prompt import ControlTokenEscaper
from plait.runtime.server.errors import invalid
from plait.runtime.tokenizer.chat_template import ChatTemplate

TemplateVariables = Annotated[dict[str, Any], Meta(max_length=64)]
THINKING = "enable_thinking"


def template_variables(variables: Mapping[str, Any] | None, enable_thinking: bool | None = None) -> dict[str, Any]:
    """The variables of `chat_template_kwargs` and `enable_thinking`, which may be beside or among them.

    Raises ApiError 400 if the two contradict each other.
    """
    merged = dict(variables or {})
    if enable_thinking is None:
        return merged
    if merged.get(THINKING, enable_thinking) != enable_thinking:
        raise invalid("'enable_thinking' and 'chat_template_kwargs' contradict each other", THINKING)
    return merged | {THINKING: enable_thinking}


def program_template(client: Client, variables: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of a program's turns, with `variables`. Raises ApiError 400 or InputError.

    The template's text of a turn may hold control tokens, so texts in the variables must not hold a part of one.
    """
    template = client.tokenizer.chat_template
    if not variables:
        return template
    if template is None:
        raise invalid("this model has no chat template", "chat_template_kwargs", "unsupported_by_model")
    escaped = ControlTokenEscaper(client.tokenizer.added_texts).escape(dict(variables))
    if escaped != variables:
        raise invalid("a text in 'chat_template_kwargs' has a control token, or a part of one", "chat_template_kwargs")
    return template.with_variables(variables)
