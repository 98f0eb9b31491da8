"""The grammar of a token automaton: a step is a binary search, a mask is a copy."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.dfa.vocabulary_dfa import VocabularyDfa
from plait.constrained.grammar import Grammar, Int32Array, Matcher, mask_of, pack_mask
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_CACHED_MASK_BYTES = 4 << 20
_TERMINATED = -1  # the state after an end token


class DfaGrammar(Grammar):
    """A TokenDfa over `vocabulary`. Masks and forced bytes are computed on demand; at most 4 MiB of masks are cached.

    >>> grammar = DfaGrammar(table, vocabulary)                           # doctest: +SKIP
    >>> grammar.matcher().accept(token)                                   # doctest: +SKIP
    True
    """

    def __init__(self, table: TokenDfa, vocabulary: Vocabulary) -> None:
        self.table = table
        self.dfa = VocabularyDfa(table, vocabulary)
        self.vocabulary = vocabulary
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.accepting = self.dfa.accepting
        self.eos_mask = mask_of(vocabulary.eos_ids, len(vocabulary))
        self._masks: dict[int, Int32Array] = {_TERMINATED: self.eos_mask}
        self._forced: dict[int, bytes] = {}
        self._forced_tokens: dict[int, list[int]] = {}
        self._max_masks = max(2, MAX_CACHED_MASK_BYTES // self.eos_mask.nbytes)

    @property
    def nbytes(self) -> int:
        num_states = len(self.accepting)
        masks = min(num_states + 1, self._max_masks) * (self.eos_mask.nbytes + 200)
        return self.dfa.nbytes + 200 * num_states + masks + 1000

    def matcher(self) -> Matcher:
        return DfaMatcher(self)

    def mask(self, state: int) -> Int32Array:
        """Returns the mask of `state`, int32 [ceil(V/32)]; read-only."""
        mask = self._masks.get(state)
        if mask is None:
            mask = pack_mask(self.dfa.allowed(state))
            if self.accepting[state]:
                mask = mask | self.eos_mask
            if len(self._masks) >= self._max_masks:
                self._masks.pop(next(iter(self._masks)), None)
            self._masks[state] = mask
        return mask

    def forced(self, state: int) -> bytes:
        """Returns the bytes that every continuation from `state` begins with."""
        forced = self._forced.get(state)
        if forced is None:
            forced = self._forced[state] = forced_bytes(self.dfa, state)
        return forced

    def forced_tokens(self, state: int) -> list[int]:
        """Returns the tokens of `forced`, without those that may turn out to be part of longer tokens."""
        tokens = self._forced_tokens.get(state)
        if tokens is None:
            text = self.forced(state)
            tokens = tokenize_forced_bytes(text, False, self.vocabulary) if text else []
            reached = self.dfa.state_after(state, tokens)
            if text and (all_tokens := tokenize_forced_bytes(text, True, self.vocabulary)):
                end = self.dfa.state_after(state, all_tokens)
                if end is not None and not self.dfa.has_edges(end):
                    tokens, reached = all_tokens, end
            tokens = self._forced_tokens[state] = tokens if reached is not None else []
        return tokens


class DfaMatcher(Matcher):
    """The state of one text under a DfaGrammar. It keeps the states passed, so that rollback truncates a list."""

    __slots__ = ("_grammar", "_state", "_states")

    def __init__(self, grammar: DfaGrammar) -> None:
        self._grammar = grammar
        self._state = 0
        self._states: list[int] = []  # the states before each accepted token

    def accept(self, token: int) -> bool:
        grammar, state = self._grammar, self._state
        if token in grammar.eos_ids:
            if state != _TERMINATED and not grammar.accepting[state]:
                return False
            reached = _TERMINATED
        elif state == _TERMINATED:
            return False
        else:
            after = grammar.dfa.next_state(state, token)
            if after is None:
                return False
            reached = after
        self._states.append(state)
        self._state = reached
        return True

    def fill_mask(self, row: Int32Array) -> None:
        row[:] = self._grammar.mask(self._state)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._states):
            raise ValueError(f"cannot roll back {n} tokens of {len(self._states)}")
        if n:
            self._state = self._states[-n]
            del self._states[-n:]

    def forced_bytes(self) -> bytes:
        return b"" if self._state == _TERMINATED else self._grammar.forced(self._state)

    def forced_tokens(self) -> list[int]:
        return [] if self._state == _TERMINATED else list(self._grammar.forced_tokens(self._state))

    def completion(self, limit: int) -> list[int] | None:
        if self._state == _TERMINATED:
            return []
        dfa = self._grammar.dfa
        return dfa.shortest_completion(self._state) if dfa.table.distance[self._state] <= limit else None

    @property
    def is_accepting(self) -> bool:
        return self._state == _TERMINATED or bool(self._grammar.accepting[self._state])

    @property
    def is_terminated(self) -> bool:
        return self._state == _TERMINATED


# -- forced bytes ----------------------------------------------------------------------------------
# What every continuation of a token automaton begins with, and how to tokenize it. Many token sequences spell one text,
# so all of them are followed until two texts differ.

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
