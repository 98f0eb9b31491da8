"""The fixed texts around calls as Lark expressions, in which some stand for a control token or for the id of a call."""

from __future__ import annotations

import re
from itertools import groupby

from plait.constrained.guidance.call_tracker import spell_control
from plait.constrained.json_schema.lark_scalars import quoted
from plait.constrained.specs import ID_PLACE, GrammarError, Reasoning, Structural
from plait.constrained.tokens.vocabulary import Vocabulary


class Marks:
    """The control tokens and the call ids of one spec.

    Raises GrammarError if an id is not that of a control token of the vocabulary.

    >>> Marks(Structural(calls, control_tokens=[("<a>", 7)]), vocabulary).literal("<a>b")      # doctest: +SKIP
    '<[7]> "b"'
    """

    def __init__(self, spec: Structural | Reasoning, vocabulary: Vocabulary) -> None:
        self.control_tokens = dict(spec.control_tokens)
        self._call_id = spec.call_id if isinstance(spec, Structural) else ""
        for index, token in enumerate(self.control_tokens.values()):
            is_control = token < len(vocabulary) and not vocabulary.token_bytes[token]
            if not is_control or token in vocabulary.eos_ids:
                raise GrammarError(f"token {token} is not a control token", f"/control_tokens/{index}")
        names = sorted(self.control_tokens, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def literal(self, before: str, name: str = "", after: str = "", *, with_id: bool = False) -> str:
        """Returns the expression of a fixed text; "" for an empty one. `name` has no control tokens, whatever it is.

        with_id: {id} stands for the id of a call.
        """
        return self._expression([*self._pieces(before), name, *self._pieces(after)], with_id)

    def around(self, before: str, body: str, after: str, name: str) -> tuple[str, list[str]]:
        """Returns the expression of a text between two fixed ones, and terminals for it, with names that begin so.

        body: the expression of the text as part of a terminal. It is one lexeme with what stands around it, like a text
        that `literal` writes, so that it can be an alternative to one.
        """
        pieces, rest = self._pieces(before), self._pieces(after)
        first = max((index + 1 for index, piece in enumerate(pieces) if isinstance(piece, int)), default=0)
        last = next((index for index, piece in enumerate(rest) if isinstance(piece, int)), len(rest))
        inner = f"{self._expression(pieces[first:])} {name}B {self._expression(rest[:last])}"
        expression = f"{self._expression(pieces[:first])} {name} {self._expression(rest[last:])}"
        return expression, [f"{name}B: {body}", f"{name}: {inner}"]

    def split(self, text: str) -> tuple[str, str]:
        """Returns the text before the first control token, and the expression of what follows."""
        pieces = self._pieces(text)
        plain = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        return plain, self._expression(pieces[bool(plain) :])

    def pattern(self, before: str, name: str = "", after: str = "", *, with_id: bool = False) -> bytes:
        """Returns the pattern (`re`) of a fixed text, in which control tokens are as `spell_control` has it."""
        return b"".join(
            self._text_pattern(piece, with_id) if isinstance(piece, str) else re.escape(spell_control(piece))
            for piece in (*self._pieces(before), name, *self._pieces(after))
        )

    def text_pattern(self, text: str) -> str:
        """Returns the pattern of a fixed text in which control tokens are spelled as given, and {id} is an id."""
        return self._text_pattern(text, with_id=True).decode()

    def to_bytes(self, text: str) -> bytes:
        """Returns a fixed text in which control tokens are as `spell_control` has it."""
        return b"".join(p.encode() if isinstance(p, str) else spell_control(p) for p in self._pieces(text))

    def _text_pattern(self, text: str, with_id: bool) -> bytes:
        parts = text.split(ID_PLACE) if with_id and self._call_id else [text]
        return self._call_id.encode().join(re.escape(part.encode()) for part in parts)

    def _pieces(self, text: str) -> list[str | int]:
        parts = self._control.split(text) if self._control is not None else [text]
        return [self.control_tokens.get(part, part) for part in parts if part]

    def _expression(self, pieces: list[str | int], with_id: bool = False) -> str:
        expressions: list[str] = []
        for is_control, group in groupby(pieces, lambda piece: isinstance(piece, int)):
            if is_control:
                expressions += [f"<[{piece}]>" for piece in group]
                continue
            text = "".join(map(str, group))
            for index, part in enumerate(text.split(ID_PLACE) if with_id and self._call_id else [text]):
                expressions += [f"/{self._call_id}/"] if index else []
                expressions += [quoted(part)] if part else []
        return " ".join(expressions)
