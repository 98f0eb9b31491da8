"""The text after a constrained value that belongs to its constraint: a beginning of what is known to follow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.runtime.tokenizer.tokenizer import Tokenizer

MAX_CHARS = 32
"""Characters of the text that belong to the constraint: enough to tell it from a longer value. The rest is appended."""
_WORD_END = re.compile(r"(?<=\S)(?=\s)")


def trailing_text(parts: list[tuple[str, bool]], tokenizer: Tokenizer) -> str:
    """Returns the beginning of the text of `parts`, (text, control) as in `Tokenizer.encode`, up to a control token.

    A longer text is cut at the end of a word, so that its tokens do not change.

    >>> following_text([(" legs and two wings, which most birds use to fly.", False)], tokenizer)   # doctest: +SKIP
    ' legs and two wings, which most'
    """
    text = ""
    for part, control in parts:
        plain = _before_control_token(part, tokenizer) if control else part
        text += plain
        if len(plain) < len(part) or len(text) > MAX_CHARS:
            break
    try:
        text.encode()
    except UnicodeEncodeError:
        return ""  # half of a surrogate pair: refused where the text is tokenized
    if len(text) <= MAX_CHARS:
        return text
    ends = [match.start() for match in _WORD_END.finditer(text[: MAX_CHARS + 1]) if match.start()]
    return text[: max(ends, default=MAX_CHARS)]


def _before_control_token(text: str, tokenizer: Tokenizer) -> str:
    places = [text.find(added) for added in tokenizer.added_texts if added]
    return text[: min((place for place in places if place >= 0), default=len(text))]
