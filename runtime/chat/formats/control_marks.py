"""Control tokens within a model's marks, such as [TOOL_CALLS]: shown to the parser, and apart from text spelled alike.

The text of an answer omits control tokens. Where a format has some, the parser reads the answer with these tokens as
their texts behind CONTROL, which no text can have, so that text that only spells such a token is no mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.chat.formats.call_format import CONTROL, CallFormat
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat
from plait.runtime.tokenizer.detokenizer import Detokenizer
from plait.runtime.tokenizer.tokenizer import Tokenizer


class ControlMarks:
    """The control tokens of a tokenizer that stand in the texts of a model's formats.

    texts: their texts; none if the marks are ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        known = {text: token for token, text in tokenizer.control_texts.items() if text}
        joined = "\0".join(texts)
        found = sorted((text for text in known if text in joined), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None
        used = {match[0] for match in self._pattern.finditer(joined)} if self._pattern else set()
        self._ids = {known[text]: text for text in used}
        self._tokenizer = tokenizer

    @property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        """The texts and ids of the control tokens, sorted."""
        return tuple(sorted((text, token) for token, text in self._ids.items()))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._tokenizer.vocabulary
        token_bytes = list(vocabulary.token_bytes)
        for token, text in self._ids.items():
            token_bytes[token] = (CONTROL + text).encode()
        return Vocabulary(tuple(token_bytes), (), vocabulary.encode)

    def detokenizer(self) -> Detokenizer:
        """Returns a detokenizer that shows these tokens behind CONTROL."""
        return Detokenizer(self._vocabulary)

    def split(self, marked: str) -> list[tuple[str, bool]]:
        """Returns the parts of a text with CONTROL before control tokens, and whether each is such a token."""
        first, *others = marked.split(CONTROL)
        parts = [(first, False)]
        for part in others:
            match = self._pattern.match(part) if self._pattern else None
            token = match[0] if match else ""
            parts += [(token, True), (part[len(token) :], False)]
        return [part for part in parts if part[0]]

    def mark(self, text: str) -> str:
        """Returns `text` with CONTROL before each control token."""
        return self._pattern.sub(lambda match: CONTROL + match[0], text) if self._pattern else text

    def mark_calls(self, call_format: CallFormat) -> CallFormat:
        """Returns a format as the parser reads it."""
        return call_format.with_texts(self.mark)

    def mark_reasoning(self, marks: ReasoningFormat) -> ReasoningFormat:
        """Returns reasoning marks as the parser reads them."""
        return replace(marks, begin=self.mark(marks.begin), end=self.mark(marks.end))

    def mark_messages(self, messages: MessageFormat) -> MessageFormat:
        """Returns the beginnings of messages as the parser reads them."""
        return MessageFormat(self.mark(messages.begin), tuple(map(self.mark, messages.texts)))

    def within(self, *texts: str) -> tuple[str, ...]:
        """Returns the control tokens that stand in `texts`."""
        return tuple(dict.fromkeys(self._pattern.findall("\0".join(texts)))) if self._pattern else ()


_SHOWN = re.compile(f"{CONTROL}(?:<[^<>]*>|\\[[^\\[\\]]*\\]|\\S)?")


def without_control_tokens(text: str) -> str:
    """Returns text without the control tokens that the parser was shown."""
    return _SHOWN.sub("", text) if CONTROL in text else text


def control_marks(
    tokenizer: Tokenizer,
    calls: CallFormat | None,
    reasoning: ReasoningFormat | None,
    messages: MessageFormat | None = None,
) -> ControlMarks:
    """Returns the control tokens in a model's formats."""
    return _control_marks(tokenizer, (*(calls.texts() if calls else ()), *texts_around(reasoning, messages)))


def texts_around(reasoning: ReasoningFormat | None, messages: MessageFormat | None) -> tuple[str, ...]:
    """Returns the marks of an answer without calls."""
    marks = (reasoning.begin, reasoning.end, reasoning.separator) if reasoning else ()
    return (*marks, *((messages.begin, *messages.texts) if messages else ()))


@lru_cache(maxsize=32)
def _control_marks(tokenizer: Tokenizer, texts: tuple[str, ...]) -> ControlMarks:
    return ControlMarks(tokenizer, texts)
