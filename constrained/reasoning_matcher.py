"""Reasoning before a constrained value: free text up to an end mark, then a separator, then the value.

    <think>\\n   begin      forced
    So 6 * 7    reasoning  any text; at most `max_tokens` tokens, then the end mark is forced
    </think>    end        the model's own, or forced
    \\n\\n        separator  forced
    {"n": 42}   value      the inner matcher's text

The end mark may cross the borders of tokens. The value begins at the border of a token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from plait.constrained.grammar import Grammar, Int32Array, Matcher, mask_of, pack_mask, set_bits
from plait.constrained.guidance.call_tracker import spell_control
from plait.constrained.specs import GrammarError, Reasoning, Regex
from plait.constrained.structural.marks import Marks
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_CACHED_MARKS = 16
_ANY = Regex("")
MAX_CHARACTER_TAIL = 3  # bytes that may follow the first one of a UTF-8 character


class ReasoningMarks:
    """The marks of a `Reasoning`, with its control tokens as `spell_control` has it.

    The states of the text before a value, and the tokens allowed in each. Shared by all grammars with these marks.

    A state is a number of bytes of begin + end + separator: those of `begin` that were written, then those of `end`
    with which the reasoning ends so far, then those of the separator. `value_state` is the last one.
    """

    def __init__(self, spec: Reasoning, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        to_bytes = Marks(spec, vocabulary).to_bytes
        begin, self.end, self.lead = to_bytes(spec.begin), to_bytes(spec.end), spec.lead.encode()
        self.text = begin + self.end + to_bytes(spec.separator)
        self._control = {spell_control(token): token for _, token in spec.control_tokens}
        self._bytes = {token: literal for literal, token in self._control.items()}
        self.free_state = len(begin)  # the first one of the reasoning
        self.end_state = self.free_state + len(self.end)  # the mark is complete
        self.value_state = len(self.text)
        self._masks: dict[int, Int32Array] = {}
        self._closing: dict[tuple[int, int], list[int]] = {}
        for start in (0, self.free_state):  # raises GrammarError
            self.closing_tokens(start)

    def bytes_of(self, token: int, state: int) -> bytes:
        """Returns what a token counts as in `state`; b"" for a control token that cannot stand there."""
        literal = self._bytes.get(token, b"")
        if literal:
            return literal if self.text.startswith(literal, state) else b""
        return self.vocabulary.token_bytes[token]

    def plain(self, data: bytes) -> bytes:
        """Returns `data` up to the first control token."""
        return data[: min((at for at in map(data.find, self._control) if at >= 0), default=len(data))]

    def is_free(self, state: int) -> bool:
        """Whether the model writes reasoning in this state."""
        return self.free_state <= state < self.end_state

    def state_after(self, state: int, data: bytes) -> int | None:
        """Returns the state after `data`; None if it cannot follow."""
        if not self.is_free(state):
            fixed = data[: self.free_state - state] if state < self.free_state else data
            if not self.text.startswith(fixed, state):
                return None
            state, data = state + len(fixed), data[len(fixed) :]
            if not data:
                return state
        written = self.end[: state - self.free_state] + data
        before, end, behind = written.partition(self.end)
        if not end:
            return self.free_state + _matched_end(before, self.end)
        return self.end_state + len(behind) if self.text.startswith(behind, self.end_state) else None

    def closing_tokens(self, state: int, num_lead: int = -1) -> list[int]:
        """Returns tokens that spell the marks from `state` on. From a state of `begin`, those of `begin` only.

        num_lead: the bytes of the lead that the reasoning ends with; -1 for none of it to be written.
        """
        tokens = self._closing.get((state, num_lead))
        if tokens is None:
            parts = [self.text[state : self.free_state]] if state < self.free_state else []
            if state >= self.free_state:
                parts = [self.lead[num_lead:]] if num_lead >= 0 and state == self.free_state else []
                parts += [self.text[state : self.end_state], self.text[max(state, self.end_state) :]]
            tokens = [token for part in parts for token in self._spell(part)]
            self._closing[state, num_lead] = tokens
        return tokens

    def _spell(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        while len(plain := self.plain(data)) < len(data):
            control = next(literal for literal in self._control if data.startswith(literal, len(plain)))
            tokens += [*self._spell_plain(plain), self._control[control]]
            data = data[len(plain) + len(control) :]
        return tokens + self._spell_plain(data)

    def _spell_plain(self, data: bytes) -> list[int]:
        known = self.vocabulary.ids_by_bytes.get(data)
        if known is not None or not data:
            return [] if known is None else [known]
        tokens = self.vocabulary.spell(data)
        if self.vocabulary.text_of(tokens) == data:
            return tokens
        raise GrammarError(f"no tokens of the vocabulary spell {data.decode(errors='replace')!r:.80}")

    def mask(self, state: int) -> Int32Array:
        """Returns the mask of `state`, int32 [ceil(V/32)]; read-only. End tokens are not in it."""
        mask = self._masks.get(state)
        if mask is None:
            mask = self._masks[state] = self._free_mask(state) if self.is_free(state) else self._forced_mask(state)
        return mask

    def _forced_mask(self, state: int) -> Int32Array:
        limit = self.free_state if state < self.free_state else self.value_state
        ids = {**self._control, **self.vocabulary.ids_by_bytes} if self._control else self.vocabulary.ids_by_bytes
        heads = (self.text[state:stop] for stop in range(state + 1, limit + 1))
        tokens = [*(ids[head] for head in heads if head in ids), *self.closing_tokens(state)[:1]]
        return mask_of(tokens, len(self.vocabulary))

    def _free_mask(self, state: int) -> Int32Array:
        allowed = np.zeros(len(self.vocabulary), np.bool_)
        allowed[self.vocabulary.trie.sorted_entry_ids] = True
        strings = self.vocabulary.token_bytes
        for token in self._candidates(state):
            if self.state_after(state, strings[token]) is None:
                allowed[token] = False
        for token in self._bytes:
            allowed[token] = bool(self.bytes_of(token, state))
        return pack_mask(allowed)

    def _candidates(self, state: int) -> list[int]:
        """Returns the tokens that may complete the end mark: those with it, and those that begin with its rest."""
        found, matched = list(_tokens_with(self.end, self.vocabulary)), self.end[: state - self.free_state]
        for size in range(1, len(matched) + 1):
            if matched.endswith(self.end[:size]):
                found += self.vocabulary.beginning_with(self.end[size:]).tolist()
        return found


@lru_cache(MAX_CACHED_MARKS)
def _tokens_with(data: bytes, vocabulary: Vocabulary) -> tuple[int, ...]:
    return tuple(token for token, string in enumerate(vocabulary.token_bytes) if data in string)


@lru_cache(MAX_CACHED_MARKS)
def _marks(spec: Reasoning, vocabulary: Vocabulary) -> ReasoningMarks:
    return ReasoningMarks(spec, vocabulary)


class ReasoningGrammar(Grammar):
    """The grammar of reasoning followed by a value of `inner`. Raises GrammarError if no tokens spell its marks."""

    def __init__(self, spec: Reasoning, inner: Grammar, vocabulary: Vocabulary) -> None:
        self.inner, self.vocabulary, self.max_tokens = inner, vocabulary, spec.max_tokens
        self.marks = _marks(msgspec.structs.replace(spec, then=_ANY, max_tokens=None), vocabulary)
        self.unchecked, self.warnings = inner.unchecked, inner.warnings
        self._end = spec.end + spec.separator

    def check(self, text: str) -> str | None:
        return self.inner.check(text.partition(self._end)[2])

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def matcher(self) -> Matcher:
        return ReasoningMatcher(self)


class _Place(NamedTuple):
    """Where a text is before its value: the state, the tokens of reasoning, the bytes that a character still needs, and
    the bytes of the lead with which it ends."""

    state: int
    num_tokens: int
    num_open_bytes: int
    num_lead: int = 0


class ReasoningMatcher(Matcher):
    """The state of one text under a ReasoningGrammar.

    `num_reasoning_tokens`: the accepted tokens before the value, with the marks and the separator.
    """

    __slots__ = ("_history", "_inner", "_marks", "_max_tokens", "_num_in_value", "_place", "_value_plan")

    def __init__(self, grammar: ReasoningGrammar) -> None:
        self._marks, self._inner = grammar.marks, grammar.inner.matcher()
        self._max_tokens = grammar.max_tokens
        self._place = _Place(0, 0, 0)
        self._history: list[_Place] = []  # the places before the tokens ahead of the value
        self._num_in_value = 0
        self._value_plan: tuple[int, list[int] | None] | None = None  # (limit, completion) at the value's beginning

    @property
    def num_reasoning_tokens(self) -> int:
        return len(self._history)

    @property
    def is_reasoning(self) -> bool:
        """Whether the value has not begun."""
        return self._place.state < self._marks.value_state

    @property
    def _must_close(self) -> bool:
        """Whether the budget is spent. A character is completed before the end mark, if it is a valid one."""
        num_over = self._place.num_tokens - (self._max_tokens or 0)
        if self._max_tokens is None or num_over < 0 or not self._marks.is_free(self._place.state):
            return False
        return not self._place.num_open_bytes or num_over >= MAX_CHARACTER_TAIL

    def accept(self, token: int) -> bool:
        if not self.is_reasoning:
            is_accepted = self._inner.accept(token)
            self._num_in_value += is_accepted
            return is_accepted
        vocabulary, place = self._marks.vocabulary, self._place
        if token in vocabulary.eos_ids or not 0 <= token < len(vocabulary):
            return False
        data = self._marks.bytes_of(token, place.state)
        state = self._marks.state_after(place.state, data) if data else None
        if state is None or (self._must_close and not self._closing.startswith(data)):
            return False
        self._history.append(place)
        num_tokens = place.num_tokens + self._marks.is_free(place.state)
        num_lead = _matched_end(self._marks.lead[: place.num_lead] + data, self._marks.lead)
        self._place = _Place(state, num_tokens, _open_bytes(place.num_open_bytes, data), num_lead)
        return True

    @property
    def _closing(self) -> bytes:
        """What ends the reasoning from here on: the rest of the lead if the end mark has not begun, and the marks."""
        marks, place = self._marks, self._place
        lead = marks.lead[place.num_lead :] if place.state == marks.free_state else b""
        return lead + marks.text[place.state :]

    def fill_mask(self, row: Int32Array) -> None:
        if not self.is_reasoning:
            self._inner.fill_mask(row)
        elif self._must_close:
            row[:] = 0
            set_bits(row, self._marks.closing_tokens(self._place.state, self._place.num_lead)[:1])
        else:
            row[:] = self._marks.mask(self._place.state)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._num_in_value + len(self._history):
            raise ValueError(f"cannot roll back {n} tokens of {self._num_in_value + len(self._history)}")
        in_value = min(n, self._num_in_value)
        self._inner.rollback(in_value)
        self._num_in_value -= in_value
        if n > in_value:
            self._place = self._history[in_value - n]
            del self._history[in_value - n :]

    def forced_bytes(self) -> bytes:
        marks, state = self._marks, self._place.state
        if not self.is_reasoning:
            return self._inner.forced_bytes()
        if state < marks.free_state:
            return marks.plain(marks.text[state : marks.free_state])
        return marks.plain(self._closing) if self._must_close or state >= marks.end_state else b""

    def forced_tokens(self) -> list[int]:
        if not self.is_reasoning:
            return self._inner.forced_tokens()
        is_forced = self._must_close or not self._marks.is_free(self._place.state)
        return list(self._marks.closing_tokens(self._place.state, self._place.num_lead)) if is_forced else []

    def completion(self, limit: int) -> list[int] | None:
        if not self.is_reasoning:
            return self._inner.completion(limit)
        marks, state, tokens = self._marks, self._place.state, list[int]()
        if state < marks.free_state:
            tokens, state = list(marks.closing_tokens(state)), marks.free_state
        tokens += marks.closing_tokens(state, self._place.num_lead)
        value = self._completion_of_value(limit - len(tokens))
        return None if value is None else tokens + value

    def _completion_of_value(self, limit: int) -> list[int] | None:
        """Returns the completion of an empty value. A search is repeated only if its result is too long."""
        if limit < 0:
            return None
        if self._value_plan is not None:
            known_limit, plan = self._value_plan
            if limit <= known_limit and (plan is None or len(plan) <= limit):
                return plan
        plan = self._inner.completion(limit)
        self._value_plan = (limit, plan)
        return plan

    @property
    def is_accepting(self) -> bool:
        return not self.is_reasoning and self._inner.is_accepting

    @property
    def is_terminated(self) -> bool:
        return not self.is_reasoning and self._inner.is_terminated


def _matched_end(text: bytes, lead: bytes) -> int:
    """Returns how many bytes of `lead` a text ends with."""
    return next((size for size in range(min(len(lead), len(text)), 0, -1) if text.endswith(lead[:size])), 0)


def _open_bytes(num_open: int, data: bytes) -> int:
    """Returns how many bytes the last UTF-8 character still needs after `data`; 0 after invalid bytes."""
    for byte in data:
        if byte & 0xC0 == 0x80:
            num_open = max(0, num_open - 1)
        else:
            num_open = 3 if byte >= 0xF0 else 2 if byte >= 0xE0 else 1 if byte >= 0xC0 else 0
    return num_open
