"""The fixed texts around calls as Lark expressions, in which some stand for a control token or for the id of a call."""

from __future__ import annotations

import json
import re

from plait.constrained.specs import ID_PLACE, GrammarError, Structural
from plait.constrained.vocabulary import Vocabulary


class Marks:
    """The control tokens and the call ids of one spec.

    Raises GrammarError if an id is not that of a control token of the vocabulary.

    >>> Marks(Structural(calls, control_tokens=[("<a>", 7)]), vocabulary).literal("<a>b")      # doctest: +SKIP
    '<[7]> "b"'
    """

    def __init__(self, spec: Structural, vocabulary: Vocabulary) -> None:
        self.control_tokens = dict(spec.control_tokens)
        self._call_id = spec.call_id
        for index, token in enumerate(self.control_tokens.values()):
            is_control = token < len(vocabulary) and not vocabulary.token_bytes[token]
            if not is_control or token in vocabulary.eos_ids:
                raise GrammarError(f"token {token} is not a control token", f"/control_tokens/{index}")
        names = sorted(self.control_tokens, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def literal(self, text: str, *, with_id: bool = False) -> str:
        """Returns the expression of a fixed text; "" for an empty one. with_id: {id} stands for the id of a call."""
        return " ".join(
            expression
            for piece in self._pieces(text)
            for expression in ([f"<[{piece}]>"] if isinstance(piece, int) else self._plain(piece, with_id))
        )

    def split(self, text: str) -> tuple[str, str]:
        """Returns the text before the first control token, and the expression of what follows."""
        plain, *rest = self._pieces(text)
        if isinstance(plain, int):
            return "", self.literal(text)
        return plain, self.literal(text[len(plain) :]) if rest else ""

    def pattern(self, text: str, *, with_id: bool = False) -> bytes:
        """Returns the pattern of Python's `re` for a fixed text, in which control tokens are spelled as given."""
        parts = text.split(ID_PLACE) if with_id and self._call_id else [text]
        return self._call_id.encode().join(re.escape(part.encode()) for part in parts)

    def _pieces(self, text: str) -> list[str | int]:
        parts = self._control.split(text) if self._control is not None else [text]
        return [self.control_tokens.get(part, part) for part in parts if part] or [""]

    def _plain(self, text: str, with_id: bool) -> list[str]:
        parts = text.split(ID_PLACE) if with_id and self._call_id else [text]
        expressions: list[str] = []
        for index, part in enumerate(parts):
            expressions += [f"/{self._call_id}/"] if index else []
            expressions += [json.dumps(part)] if part else []
        return expressions


def regex_literal(text: str) -> str:
    """Returns the regular expression of one text.

    >>> regex_literal("a/")
    'a\\\\u{2f}'
    """
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)
