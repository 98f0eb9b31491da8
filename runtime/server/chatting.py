"""A conversation made ready to run: its prompt's tokens, its constraint, and a reader for the answer.

Every chat protocol goes through `prepare`.

Knows: templates, formats, constraints. Must not know: protocols, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.constrained.specs import Spec
from plait.runtime.client.client import Client
from plait.runtime.server.chat_prompt import Parts, chat_parts
from plait.runtime.server.conversation import Conversation
from plait.runtime.server.errors import invalid
from plait.runtime.server.formats import ReasoningFormat, reasoning_format, tool_constraint, tool_format
from plait.runtime.server.reading import Reader
from plait.runtime.server.running import LONG_TEXT, tokenize

MAX_TOOLS = 128


@dataclass(frozen=True)
class Prepared:
    """`new_reader()` takes one answer apart. `constraint_param`: the request's parameter that a refusal is about."""

    prompt_ids: Sequence[int]
    constraint: Spec | None
    constraint_param: str | None
    new_reader: Callable[[], Reader]


async def prepare(client: Client, asked: Conversation) -> Prepared:
    """Raises ApiError or InputError for a conversation that this model cannot take."""
    template = client.tokenizer.chat_template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "model", "unsupported_by_model")
    style, reasoning = tool_format(template.source), reasoning_format(template.source)
    names = [tool.name for tool in asked.callable_tools]
    constraint, param = asked.constraint, asked.constraint_param
    if names:
        constraint, param = tool_constraint(style, asked), asked.callable_tools[0].param
    arguments = (template, client.tokenizer.added_texts, asked, style)
    if sum(len(turn.text) for turn in asked.turns) > LONG_TEXT:
        parts = await asyncio.to_thread(chat_parts, *arguments)
    else:
        parts = chat_parts(*arguments)
    thinks = _ends_with(parts, reasoning) and asked.add_generation_prompt
    if thinks and constraint is not None and (not names or asked.must_call):
        assert reasoning is not None  # an answer that is constrained from its first letter has no room for thought
        parts, thinks = [*parts, (f"\n{reasoning.end}\n\n", True)], False
    ids = await tokenize(client, parts)
    tools = (style, names) if names else None
    return Prepared(ids, constraint, param, lambda: Reader(reasoning, thinks, tools))


def _ends_with(parts: Parts, reasoning: ReasoningFormat | None) -> bool:
    """Whether the template has opened the reasoning itself."""
    return bool(reasoning and parts and parts[-1][1] and parts[-1][0].rstrip().endswith(reasoning.begin))
