"""Choices behind a text, tokenized as one with it: "It is " and "red" meet in the token " red".

A model has hardly ever seen a text tokenized as "It is", " ", "red": scored so, the likeliest choice can lose. So the
last tokens of the text are tokenized anew together with each choice, and what any choice changes belongs to all of
them, which are then compared from the same character on (token healing; SGLang's select scores so too).

Knows: token ids. Must not know: sessions, how choices are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.runtime.tokenizer.tokenizer import Tokenizer

MAX_JOINED = 8  # tokens at the end of a text that what comes behind it may join to others


def joined(
    tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]], choices: Sequence[str], *, at_start: bool
) -> tuple[list[int], list[list[int]]]:
    """The ids of the text, less those at its end that a choice changes, and the ids of each choice behind them.

    `parts`: (text, control), as `Tokenizer.encode` takes them. Some of a text that is not empty is always left.

    >>> joined(tokenizer, [("It is ", False)], ["red", "blue"], at_start=True)    # doctest: +SKIP
    ([1589, 314], [[1928], [4461]])
    """
    ids = tokenizer.encode(parts, at_start=at_start)
    plain = ids, [tokenizer.encode_plain(choice) for choice in choices]
    tail = _tail(tokenizer, parts, ids)
    if not tail:
        return plain
    last = tokenizer.encode_plain(tail)
    whole = [tokenizer.encode_plain(tail + choice) for choice in choices]
    num_common = min(num_alike(last, each) for each in whole)
    kept = ids[: len(ids) - len(last) + num_common]
    behind = [each[num_common:] for each in whole]
    return (kept, behind) if kept and all(behind) else plain


def num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements from the first on both have alike.

    >>> num_alike([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(one, other, strict=False)  # the longer one goes on
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tail(tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]], ids: Sequence[int]) -> str:
    """The text of the last few ids, if they are plain text that gives the same ids alone; else ""."""
    if not parts or parts[-1][1]:
        return ""
    for size in range(min(MAX_JOINED, len(ids)), 0, -1):
        last = list(ids[-size:])
        data = b"".join(tokenizer.vocabulary.token_bytes[each] for each in last)
        text = data.decode(errors="replace")
        if parts[-1][0].endswith(text) and tokenizer.encode_plain(text) == last:
            return text
    return ""
