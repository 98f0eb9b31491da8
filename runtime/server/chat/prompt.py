"""Renders a conversation with the model's chat template, such that client text never becomes a control token.

Before rendering, a placeholder replaces every control token in a client's texts, and every part of one at a text's
edge; after rendering, the placeholders become plain text again. So the template may trim and compare the texts, and
only the template's own text contains control tokens.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import Any, NamedTuple

from plait.runtime.chat.derivation.model_formats import PLAIN_FORMATS, ModelFormats
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.errors import InputError
from plait.runtime.server.chat.conversation import Conversation
from plait.runtime.server.chat.template_messages import template_messages, tool_as_json
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.literal_pattern import find_in_pieces, literal_pattern

PromptParts = list[tuple[str, bool]]  # (text, whether it is the template's own text and may hold control tokens)


class ControlTokenEscaper:
    """Replaces control tokens in texts by placeholders, and restores them as plain text.

    `added_texts`: the texts of the tokenizer's added tokens, which include all control tokens.
    """

    def __init__(self, added_texts: frozenset[str]) -> None:
        self._control_token_pattern = _control_token_pattern(added_texts)
        self._nonce = secrets.token_hex(8)
        self._escaped_texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self.end_marker = f"Qz{self._nonce}endzQ"

    def escape(self, value: Any) -> Any:
        """Returns a string, or all strings within JSON, with control tokens replaced."""
        if isinstance(value, str):
            pattern = self._control_token_pattern
            return value if pattern is None else self._escape_text(value, pattern)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def _escape_text(self, text: str, search: _ControlTokenPattern) -> str:
        """Replaces whole tokens, then a token's beginning at the end of `text`, then a token's end at its start."""
        parts, end = [], 0
        for match in find_in_pieces(search.pattern, text, search.max_length):
            parts += [text[end : match.start()], self._placeholder(match[0])]
            end = match.end()
        if parts:
            text = "".join([*parts, text[end:]])
        if not search.first_chars.isdisjoint(text[-search.max_length :]):
            for size in range(min(search.max_length, len(text)), 0, -1):
                if text[-size:] in search.prefixes:
                    text = text[:-size] + self._placeholder(text[-size:])
                    break
        if not search.last_chars.isdisjoint(text[: search.max_length]):
            for size in range(min(search.max_length, len(text)), 0, -1):
                if text[:size] in search.suffixes:
                    return self._placeholder(text[:size]) + text[size:]
        return text

    def _placeholder(self, text: str) -> str:
        self._numbers[str(len(self._escaped_texts))] = len(self._escaped_texts)
        self._escaped_texts.append(text)
        return f"Qz{self._nonce}n{len(self._escaped_texts) - 1}zQ"

    def restore(self, rendered: str) -> PromptParts:
        """Splits a rendered prompt into the template's text and the restored texts."""
        marker = f"Qz{self._nonce}n"
        first, *pieces = rendered.split(marker)
        parts = [(first, True)]
        for piece in pieces:
            number, end, rest = piece.partition("zQ")
            if end and number in self._numbers:
                parts += [(self._escaped_texts[self._numbers[number]], False), (rest, True)]
            else:  # the template has cut the placeholder
                parts.append((marker + piece, True))
        return [part for part in parts if part[0]]


class _ControlTokenPattern(NamedTuple):
    """A pattern of all control tokens, and their proper prefixes and suffixes, which the template could complete."""

    pattern: re.Pattern[str]
    prefixes: frozenset[str]
    suffixes: frozenset[str]
    first_chars: frozenset[str]
    last_chars: frozenset[str]
    max_length: int


@lru_cache(maxsize=8)
def _control_token_pattern(added_texts: frozenset[str]) -> _ControlTokenPattern | None:
    pattern = literal_pattern(added_texts)
    if pattern is None:
        return None
    prefixes = frozenset(text[:size] for text in added_texts for size in range(1, len(text)))
    suffixes = frozenset(text[size:] for text in added_texts for size in range(1, len(text)))
    edge_chars = frozenset(text[0] for text in added_texts), frozenset(text[-1] for text in added_texts)
    return _ControlTokenPattern(pattern, prefixes, suffixes, *edge_chars, max(map(len, added_texts)))


def render_chat(
    template: ChatTemplate,
    added_texts: frozenset[str],
    conversation: Conversation,
    call_format: CallFormat,
    formats: ModelFormats = PLAIN_FORMATS,
) -> PromptParts:
    """Renders the prompt of a conversation. Raises InputError if the chat template refuses its turns, and ApiError 400
    for an earlier call whose arguments it cannot write."""
    escaper = ControlTokenEscaper(added_texts)
    messages = template_messages(conversation, call_format, formats, escaper.escape)
    if conversation.continue_final:
        _append(messages[-1], escaper.end_marker)
    tools = conversation.tools if call_format.is_native else ()
    rendered = template.render(
        messages,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final,
        tools=escaper.escape([tool_as_json(tool) for tool in tools]) or None,
        variables=escaper.escape(dict(conversation.template_variables)),
    )
    if conversation.continue_final:
        before, end_marker, _ = rendered.partition(escaper.end_marker)
        if not end_marker:
            raise InputError("the chat template changes the last turn, so it cannot be continued")
        rendered = before
    return escaper.restore(rendered)


def _append(message: dict[str, Any], text: str) -> None:
    """Adds text at the end of a message's content, which is a text or a list of parts."""
    content = message["content"]
    message["content"] = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
