"""Forced bytes: what every continuation of a token automaton begins with, and how to tokenize it.

Many token sequences spell one text, so all of them are followed until two texts differ.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from plait.constrained.dfa.vocabulary_dfa import VocabularyDfa
from plait.constrained.tokens.byte_trie import Int32Array
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_FORCED_BYTES = 4096


def forced_bytes(dfa: VocabularyDfa, state: int) -> bytes:
    """Returns the longest common prefix of all complete continuations from `state`, at most 4096 bytes.

    Returns b"" if the text may end at `state`. Takes tens of microseconds, more with the length.
    """
    text, limit = b"", MAX_FORCED_BYTES  # one continuation; the length up to which all continuations agree
    todo, seen = [(0, state)], {(0, state)}  # (bytes passed, state), shortest first
    while todo and todo[0][0] < limit:
        at, state = heappop(todo)
        if dfa.accepting[state]:
            limit = at
            break
        longest, common, inside = _common_prefix(dfa, state)
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


def _common_prefix(dfa: VocabularyDfa, state: int) -> tuple[bytes, int, list[tuple[int, int]]]:
    """Returns (the longest token, how many of its bytes are common, (length, next state) of each token within those).

    Tokens that extend beyond the common part all share it, and so do the texts after tokens that end within it.
    """
    (trie, nodes, _), vocabulary = dfa.row(state), dfa.vocabulary
    if not len(nodes):
        return b"", 0, []
    first = _extreme(trie.first_token[nodes], vocabulary, np.argmin)
    last = _extreme(trie.last_token[nodes], vocabulary, np.argmax)
    if first[:1] != last[:1]:
        return last, 0, []
    tokens = trie.tokens_at(nodes)
    ranks = vocabulary.byte_rank[tokens]
    inside: list[tuple[int, int]] = []
    for _ in range(len(tokens)):  # in byte order; it ends at the first token that is no beginning of the last one
        place = int(ranks.argmin())
        token = vocabulary.token_bytes[int(tokens[place])]
        if not last.startswith(token):
            return last, _common_prefix_length(token, last), inside
        after = dfa.next_state(state, int(tokens[place]))
        assert after is not None
        inside.append((len(token), after))
        ranks[place] = len(vocabulary)
    return last, MAX_FORCED_BYTES, inside


def _extreme(tokens: Int32Array, vocabulary: Vocabulary, choose: Callable[[Int32Array], np.intp]) -> bytes:
    """Returns the first or the last of `tokens` in byte order, as `choose` does of their ranks."""
    return vocabulary.token_bytes[int(tokens[choose(vocabulary.byte_rank[tokens])])]


def _common_prefix_length(left: bytes, right: bytes) -> int:
    """Returns the length of the common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def tokenize_forced_bytes(forced: bytes, is_complete: bool, vocabulary: Vocabulary) -> list[int]:
    """Returns `forced` as the tokenizer splits it, without tokens that could merge with the unknown text after it.

    With `is_complete` no text follows, and all tokens are returned. Otherwise an incomplete character is left out, and
    everything from the first token on that, together with the forced bytes after it, begins a longer token.

    >>> tokenize_forced_bytes(b"ab", True, vocabulary)                                # doctest: +SKIP
    [7]
    """
    text = forced.decode(errors="ignore") if not is_complete else forced.decode(errors="replace")
    tokens = list(vocabulary.encode(text))
    if vocabulary.text_of(tokens) != text.encode():
        return []
    if is_complete:
        return tokens if text.encode() == forced else []
    at = 0
    for index, token in enumerate(tokens):
        if vocabulary.is_proper_prefix_of_token(forced[at:]):
            return tokens[:index]
        at += len(vocabulary.token_bytes[token])
    return tokens
