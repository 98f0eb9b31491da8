"""A conversation made ready to run, and its answer taken apart: what every chat protocol goes through.

`prepare` gives the prompt's tokens and the constraint; an `Answer` reads one call as it comes.

Knows: templates, formats, constraints. Must not know: protocols, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.following import Progress
from plait.runtime.messages import TokenLogprob
from plait.runtime.server.chat_prompt import Parts, chat_parts
from plait.runtime.server.conversation import Conversation
from plait.runtime.server.errors import invalid
from plait.runtime.server.formats import (
    ReasoningFormat,
    answer_of_json,
    reasoning_format,
    tool_constraint,
    tool_format,
)
from plait.runtime.server.logprobs import LogprobFeed
from plait.runtime.server.reading import Part, Reader
from plait.runtime.server.running import LONG_TEXT, tokenize

MAX_TOOLS = 128


@dataclass(frozen=True)
class Prepared:
    """`new_reader()` takes one answer apart. `constraint_param`: the request's parameter that a refusal is about."""

    prompt_ids: Sequence[int]
    constraint: Spec | None
    constraint_param: str | None
    new_reader: Callable[[], Reader]


class Answer:
    """One call as it comes: its parts, its logprobs, and how it ended.

    `finish_reason` is "tool_calls" where the model called one and was not cut off, by the limit or by a stop string.
    `logprobs` collects what `read` has come to; a protocol takes them from there.
    """

    def __init__(self, prepared: Prepared, client: Client, call: Call) -> None:
        self.call = call
        self._reader = prepared.new_reader()
        self._feed = LogprobFeed(client.tokenizer.vocabulary.token_bytes)
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None

    def read(self, news: Progress) -> list[Part]:
        """The parts that are certain now."""
        parts = self._reader.push(news.text) if news.text else []
        if news.logprobs or self._feed.is_behind:
            self.logprobs += self._feed.push(news)
        if news.ended:
            parts += self._reader.finish()
            reason = self.call.result(0).finish_reason
            is_call = self._reader.num_calls and not self._reader.is_within_arguments
            self.finish_reason = "tool_calls" if reason == "stop" and is_call else reason
        return parts

    def read_whole(self, result: CallResult) -> list[Part]:
        """The parts of a call that is over."""
        return self.read(Progress(result.text, result.token_ids, result.logprobs or [], True))


async def prepare(client: Client, asked: Conversation) -> Prepared:
    """Raises ApiError or InputError for a conversation that this model cannot take."""
    template = client.tokenizer.chat_template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "model", "unsupported_by_model")
    is_json = answer_of_json(asked) is not None
    style = tool_format(template.source, beside_json=is_json)
    reasoning, names = reasoning_format(template.source), [tool.name for tool in asked.callable_tools]
    constraint, param = asked.constraint, asked.constraint_param
    if names:
        constraint, param = tool_constraint(style, asked), asked.callable_tools[0].param
    arguments = (template, client.tokenizer.added_texts, asked, style)
    if sum(len(turn.text) for turn in asked.turns) > LONG_TEXT:
        parts = await asyncio.to_thread(chat_parts, *arguments)
    else:
        parts = chat_parts(*arguments)
    thinks = _ends_with(parts, reasoning) and asked.add_generation_prompt
    if thinks and constraint is not None and (not names or asked.must_call or is_json):
        assert reasoning is not None  # an answer that is constrained from its first letter has no room for thought
        parts, thinks = [*parts, (f"\n{reasoning.end}\n\n", True)], False
    ids = await tokenize(client, parts)
    tools = (style, names) if names else None
    return Prepared(ids, constraint, param, lambda: Reader(reasoning, thinks, tools, is_json))


def _ends_with(parts: Parts, reasoning: ReasoningFormat | None) -> bool:
    """Whether the template has opened the reasoning itself."""
    return bool(reasoning and parts and parts[-1][1] and parts[-1][0].rstrip().endswith(reasoning.begin))
