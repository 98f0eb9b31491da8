"""Choices behind a text, tokenized as one with it: "It is " and "red" meet in the token " red".

A model has hardly ever seen a text tokenized as "It is", " ", "red": scored so, the likeliest choice can lose. So the
last tokens of the text are tokenized anew together with each choice, and what any choice changes belongs to all of
them, which are then compared from the same character on (token healing; SGLang's select scores so too).

Knows: token ids. Must not know: sessions, how choices are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from plait.runtime.messages import MAX_REPLACED

if TYPE_CHECKING:
    from plait.runtime.tokenizer.tokenizer import Tokenizer

MAX_HEALED_TOKENS = MAX_REPLACED  # tokens at the end of a text that what comes behind it may join to others
MAX_TAIL_CHARS = 1024  # of a text's end that is kept for what comes behind it


class TextTail(NamedTuple):
    """How a text ends: its last ids, at most MAX_HEALED_TOKENS, and the plain text that the last of these stand for.

    Nothing is known of a text's end where tokens came that nobody wrote: `UNKNOWN_TAIL`.
    """

    ids: tuple[int, ...] = ()
    text: str = ""

    def extend(self, parts: Sequence[tuple[str, bool]], ids: Sequence[int]) -> TextTail:
        """The end once `parts`, whose ids are `ids`, stand behind this one.

        >>> TextTail((5,), "It").extend([(" is", False)], [6])
        TextTail(ids=(5, 6), text='It is')
        """
        run = [text for text, _ in takewhile(lambda part: not part[1], reversed(parts))]
        before = [self.text] if len(run) == len(parts) else []
        whole = "".join([*before, *reversed(run)])
        return TextTail((*self.ids, *ids)[-MAX_HEALED_TOKENS:], whole[-MAX_TAIL_CHARS:])


UNKNOWN_TAIL = TextTail()


class HealedChoices(NamedTuple):
    """The ids of the text, how many at the end of all of it the choices stand in for, and the ids of each choice then.

    The text's ids are whole, so that it is still all there where no choice comes of it.
    """

    ids: list[int]
    num_replaced: int
    choices: list[list[int]]


def heal_choices(
    tokenizer: Tokenizer,
    parts: Sequence[tuple[str, bool]],
    choices: Sequence[str],
    *,
    num_sent: int = 0,
    sent: TextTail = UNKNOWN_TAIL,
) -> HealedChoices:
    """The ids of `parts`, and of the choices behind them with what of the text's end any choice changes.

    `parts`: (text, control), as `Tokenizer.encode` takes them. `num_sent` tokens stand before them and end with `sent`;
    where `parts` are not enough some of these are replaced. Of a text that is not empty some is always left.

    >>> joined(tokenizer, [("It is ", False)], ["red", "blue"])                    # doctest: +SKIP
    Joined(ids=[1589, 314, 216], num_replaced=1, choices=[[1928], [4461]])
    """
    ids = tokenizer.encode(parts, at_start=not num_sent)
    plain = HealedChoices(ids, 0, [tokenizer.encode_plain(choice) for choice in choices])
    tail = _tail(tokenizer, sent.extend(parts, ids))
    if not tail:
        return plain
    last = tokenizer.encode_plain(tail)
    whole = [tokenizer.encode_plain(tail + choice) for choice in choices]
    num_common = min(common_prefix_length(last, each) for each in whole)
    behind = [each[num_common:] for each in whole]
    num_changed = len(last) - num_common
    if num_changed >= num_sent + len(ids) or not all(behind):
        return plain
    return HealedChoices(ids, num_changed, behind)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements from the first on both have alike.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(one, other, strict=False)  # the longer one goes on
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tail(tokenizer: Tokenizer, end: TextTail) -> str:
    """The text of the last few ids, if they are plain text that gives the same ids alone; else ""."""
    for size in range(len(end.ids), 0, -1):
        last = list(end.ids[-size:])
        data = b"".join(tokenizer.vocabulary.token_bytes[each] for each in last)
        text = data.decode(errors="replace")
        if text and end.text.endswith(text) and tokenizer.encode_plain(text) == last:
            return text
    return ""
