"""The grammar of a token automaton: a step is a binary search, a mask is a copy."""

from __future__ import annotations

from plait.constrained.dfa.forced_bytes import forced_bytes, tokenize_forced_bytes
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
