"""The chat pipeline that all chat protocols share.

`prepare_chat` turns a conversation into prompt tokens and a constraint; `ChatOutput` parses the updates of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from plait.constrained.specs import Reasoning, Spec
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.chat.argument_readers import find_types
from plait.runtime.chat.derivation.model_formats import fitted_calls, formats_in_thread
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.chat.formats.control_marks import ControlMarks, control_marks, texts_around
from plait.runtime.chat.formats.reasoning_format import MessageFormat
from plait.runtime.chat.parser import OutputParser, ParsedPart
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.server.chat.conversation import Conversation
from plait.runtime.server.chat.prompt import PromptParts, render_chat
from plait.runtime.server.chat.thinking import after_reasoning, reasoning_marks, with_thinking
from plait.runtime.server.chat.tool_constraint import json_answer_constraint, tool_constraint, tool_params
from plait.runtime.server.chat.untagged_calls import UntaggedCallParser, may_call_untagged
from plait.runtime.server.errors import ConstraintParam, invalid
from plait.runtime.server.generation.logprobs import LogprobAligner
from plait.runtime.server.generation.submission import TOKENIZE_IN_THREAD_CHARS, check_fits_context, tokenize
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.in_flight import current_request
from plait.runtime.tokenizer.token_healing import num_plain_bytes

CONVERT_IN_THREAD_VALUES = 200  # of a conversation; the work on more takes milliseconds
CHARS_PER_VALUE = 25  # a text of this length counts as one value


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that is ready to run.

    constraint_param: the request's parameter that a refused constraint came from. new_parser: makes the parser of one
    answer. plain_bytes: those of text that the prompt ends with, such as a prefilled answer. shown_tokens: the control
    tokens that the parser must see; None if there are none. shows_reasoning: the answer has its reasoning. warnings:
    gets those about how the answer was parsed.
    """

    prompt_ids: Sequence[int]
    constraint: Spec | None
    constraint_param: ConstraintParam
    new_parser: Callable[[], OutputParser | UntaggedCallParser]
    plain_bytes: int = 0
    shown_tokens: ControlMarks | None = None
    shows_reasoning: bool = True
    warnings: list[str] = field(default_factory=list)


class ChatOutput:
    """Parses the updates of one call into parts, logprobs and the finish reason.

    `finish_reason` is "tool_calls" if the model called a tool and the call was not cut off by the token limit or a stop
    string. `logprobs` collects the entries of the text parsed so far; a protocol removes those it has sent.
    """

    def __init__(self, prepared: PreparedChat, client: Client, call: Call) -> None:
        self.call = call
        self._parser, self._shows_reasoning = prepared.new_parser(), prepared.shows_reasoning
        self._detokenizer = prepared.shown_tokens.detokenizer() if prepared.shown_tokens else None
        self._logprob_aligner = LogprobAligner(client.tokenizer.vocabulary.token_bytes)
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None

    def parse_update(self, update: CallUpdate) -> list[ParsedPart]:
        """Returns the parts that are complete enough to be sent."""
        text = update.text if self._detokenizer is None else self._detokenizer.push(update.token_ids)
        parts = self._parser.push(text) if text else []
        if update.encoded_logprobs or self._logprob_aligner.has_pending:
            self.logprobs += self._logprob_aligner.push(update)
        if update.finished:
            parts += self._parser.finish()
            reason = self.call.result(0).finish_reason
            is_call = self._parser.num_calls and not self._parser.is_within_arguments
            self.finish_reason = "tool_calls" if reason == "stop" and is_call else reason
        return parts if self._shows_reasoning else [part for part in parts if part.kind != "reasoning"]

    def parse_result(self, result: CallResult) -> list[ParsedPart]:
        """Returns all parts of a finished call."""
        return self.parse_update(CallUpdate(result.text, result.token_ids, result.encoded_logprobs or (), True))


async def prepare_chat(
    client: Client, conversation: Conversation, *, untagged_tool_calls: bool = False
) -> PreparedChat:
    """Renders and tokenizes a conversation. `untagged_tool_calls`: the server's default.

    Raises ApiError or InputError for a conversation that the model does not support.
    """
    template = client.tokenizer.chat_template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "model", "unsupported_by_model")
    conversation = with_thinking(conversation, template)
    thinking, is_json = conversation.thinking, json_answer_constraint(conversation) is not None
    formats = await formats_in_thread(template)
    call_format = fitted_calls(formats, client.tokenizer, with_json_answer=is_json)
    tools, messages = conversation.callable_tools, formats.messages
    marks = control_marks(client.tokenizer, call_format if tools else None, formats.reasoning, messages)
    constraint: Spec | None = conversation.constraint
    param: ConstraintParam = conversation.constraint_param
    num_chars = sum(len(turn.text) for turn in conversation.turns)
    if num_chars > TOKENIZE_IN_THREAD_CHARS:
        check_fits_context(client, num_chars)  # before the prompt is rendered
    is_large = has_more_values(conversation, CONVERT_IN_THREAD_VALUES)
    added = client.tokenizer.added_texts
    parts = await run_in_thread_if(is_large, render_chat, template, added, conversation, call_format, formats)
    parts, in_message, text_head = _message_head(parts, conversation, call_format, messages)
    if tools:
        free = marks.within(*texts_around(formats.reasoning, messages))
        arguments = call_format, conversation, marks.pairs, free, text_head
        calls = await run_in_thread_if(is_large, tool_constraint, *arguments)
        constraint, param = calls, tool_params(calls, conversation)
        text_head = ""  # the constraint has it
    reasoning = reasoning_marks(formats.reasoning, thinking, constraint)
    opens_reasoning = reasoning is not None and _ends_with(parts, reasoning.begin)
    starts_in_reasoning = opens_reasoning and conversation.add_generation_prompt
    is_whole = constraint is not None and (not tools or conversation.must_call or is_json)
    constraint = after_reasoning(constraint, thinking, reasoning, starts_in_reasoning, marks.pairs, text_head)
    if starts_in_reasoning and (thinking.is_wanted is False or (is_whole and not isinstance(constraint, Reasoning))):
        assert reasoning is not None  # close it: it is not wanted, or constrained from its first character
        closing = reasoning.lead + reasoning.end + reasoning.separator
        parts, starts_in_reasoning = [*parts, (closing, True)], False
    if text_head and is_whole and not isinstance(constraint, Reasoning):
        parts, in_message = [*parts, (text_head, True)], False
    ids = await tokenize(client, parts)
    new_parser: partial[Any] = partial(
        OutputParser,
        marks.mark_reasoning(reasoning) if reasoning else None,
        starts_in_reasoning,
        marks.mark_calls(call_format) if tools else None,
        {tool.name: tool.parameters for tool in tools},
        is_json,
        marks.mark_messages(messages) if messages else None,
        in_message,
    )
    warnings: list[str] = []
    if is_large and (record := current_request()):
        record.before_reading = partial(find_types, call_format.arguments, [tool.parameters for tool in tools])
    if may_call_untagged(conversation, untagged_tool_calls):
        new_parser = partial(_with_untagged_calls, new_parser, conversation, warnings)
    shown_tokens, plain_bytes = marks if marks.pairs else None, num_plain_bytes(parts)
    return PreparedChat(ids, constraint, param, new_parser, plain_bytes, shown_tokens, thinking.is_shown, warnings)


def _message_head(
    parts: PromptParts, conversation: Conversation, call_format: CallFormat, messages: MessageFormat | None
) -> tuple[PromptParts, bool, str]:
    """Returns the prompt, whether it ends with the beginning of a message, and what a text has before it then.

    Where calls begin as messages do, the prompt is without that beginning: the answer writes it in either case.
    """
    if messages is None or not conversation.add_generation_prompt or not _ends_with(parts, messages.begin):
        return parts, False, ""
    if conversation.callable_tools and call_format.opener.startswith(messages.begin):
        return _without_end(parts, messages.begin), False, messages.begin + messages.texts[0]
    return parts, True, messages.texts[0]


def has_more_values(conversation: Conversation, limit: int) -> bool:
    """Whether the texts of the turns, the arguments of their calls, the tools and the template's variables have more
    than `limit` values. A text counts by its length."""
    num_left = limit
    pending: list[Any] = [conversation.template_variables]
    for turn in conversation.turns:
        pending += [turn.text, turn.reasoning, turn.name, *(call.arguments for call in turn.calls)]
    for tool in conversation.tools:
        pending += [tool.description, tool.parameters]
    while pending and num_left >= 0:
        value = pending.pop()
        num_left -= 1
        if isinstance(value, str):
            num_left -= len(value) // CHARS_PER_VALUE
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
    return num_left < 0


def _with_untagged_calls(
    new_parser: Callable[[], OutputParser], conversation: Conversation, warnings: list[str]
) -> UntaggedCallParser:
    return UntaggedCallParser(new_parser(), conversation, warnings)


def _ends_with(parts: PromptParts, mark: str) -> bool:
    """Whether the template's own text ends the prompt, with a mark that is not empty."""
    return bool(mark and parts and parts[-1][1] and parts[-1][0].rstrip().endswith(mark))


def _without_end(parts: PromptParts, end: str) -> PromptParts:
    return [*parts[:-1], (parts[-1][0].rstrip().removesuffix(end), True)]
