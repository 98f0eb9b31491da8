"""What every continuation begins with, read from a token automaton.

Knows: a Table and the bytes of tokens. Must not know: how forced bytes are tokenized or used.
Many tokenizations spell one text, so every way of spelling it is followed until two of them differ.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.vocabulary import Vocabulary

MAX_FORCED_BYTES = 4096


def forced_bytes(table: TokenDfa, state: int, vocabulary: Vocabulary) -> bytes:
    """The longest common prefix of the bytes of all complete continuations from `state`, cut at 4096 bytes.

    b"" where the text may end at `state`. Costs tens of microseconds and more with the length.
    """
    text, limit = (
        b"",
        MAX_FORCED_BYTES,
    )  # text: one continuation, right up to its end; limit: where all still agree
    todo, seen = [(0, state)], {(0, state)}  # (bytes passed, state), shortest first
    while todo and todo[0][0] < limit:
        at, state = heappop(todo)
        if table.accepting[state]:
            limit = at
            break
        longest, common, inside = _common_prefix(table, state, vocabulary)
        agreed = _common_prefix_length(text[at:limit], longest)
        if at + len(longest) > len(text) and at + agreed == len(text):
            text = text[:at] + longest
            agreed = len(longest)
        if agreed < min(len(longest), limit - at):
            limit = at + agreed
        limit = min(limit, at + common)
        for length, reached in inside:
            item = (at + length, reached)
            if item not in seen:
                seen.add(item)
                heappush(todo, item)
    return text[:limit]


def _common_prefix(table: TokenDfa, state: int, vocabulary: Vocabulary) -> tuple[bytes, int, list[tuple[int, int]]]:
    """(a token, how many of its bytes are common, (length, next state) of each token inside those).

    The tokens that go on beyond the common part all share it, and so do the texts behind those that end in
    it.
    """
    row = slice(int(table.row_offsets[state]), int(table.row_offsets[state + 1]))
    ranks = vocabulary.byte_rank[table.tokens[row]]
    if not len(ranks):
        return b"", 0, []
    low, high = int(ranks.argmin()), int(ranks.argmax())
    tokens, next_states = table.tokens[row], table.next_states[row]
    last = vocabulary.token_bytes[int(tokens[high])]
    if vocabulary.token_bytes[int(tokens[low])][:1] != last[:1]:
        return last, 0, []
    inside: list[tuple[int, int]] = []
    for place in np.argsort(ranks, kind="stable").tolist():
        token = vocabulary.token_bytes[int(tokens[place])]
        if not last.startswith(token):
            return last, _common_prefix_length(token, last), inside
        inside.append((len(token), int(next_states[place])))
    return last, MAX_FORCED_BYTES, inside


def _common_prefix_length(left: bytes, right: bytes) -> int:
    """The length of the common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def tokenize_forced_bytes(forced: bytes, is_complete: bool, vocabulary: Vocabulary) -> list[int]:
    """`forced` as the tokenizer splits it, less what could be merged with the unknown text behind it.

    With `is_complete` nothing can follow, and nothing is held back. A character that is cut off is, and so is
    each token from the first on that begins a longer one together with all that is forced behind it.

    >>> tokenize_forced_bytes(b"ab", True, vocabulary)                                # doctest: +SKIP
    [7]
    """
    text = forced.decode(errors="ignore") if not is_complete else forced.decode(errors="replace")
    tokens = list(vocabulary.encode(text))
    if b"".join(vocabulary.token_bytes[token] for token in tokens) != text.encode():
        return []
    if is_complete:
        return tokens if text.encode() == forced else []
    at = 0
    for index, token in enumerate(tokens):
        if vocabulary.is_proper_prefix_of_token(forced[at:]):
            return tokens[:index]
        at += len(vocabulary.token_bytes[token])
    return tokens
