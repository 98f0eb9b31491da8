"""Which tokens repeat an item or a name where JSON may not: under `uniqueItems`, and where names are counted."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import numpy.typing as npt

from plait.constrained.grammar import Int32Array, mask_words, pack_mask
from plait.constrained.guidance.completion_walker import LlguidanceWalker
from plait.constrained.guidance.item_tracker import (
    JSON_QUOTE,
    NAME,
    OUTSIDE,
    SCALAR,
    STRING,
    Frame,
    ItemTracker,
    State,
    rests_of_seen,
    unique_frame,
)
from plait.constrained.guidance.unique_paths import Nodes
from plait.constrained.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar

MAX_TRIED_STATES = 32  # in the search for an item that differs from all earlier ones
MAX_TRIED_TOKENS = 96  # where more tokens are allowed than this, one of them is taken to lead to another item
MAX_KNOWN = 10_000  # items and names of which it is kept whether many others continue them
_LITERALS = (b"true", b"false", b"null", b"True", b"False", b"None")
_LITERAL_ENDS = {literal[at:] for literal in _LITERALS for at in range(len(literal))}
_ENDING = re.compile(
    rb'".*"|[,\]}]|(?:\A|[\[{: \t\r\n])(?:' + b"|".join(sorted(_LITERAL_ENDS)) + rb')\Z|\A[^"]*[0-9el][ \t\r\n]',
    re.DOTALL,
)

Bits = npt.NDArray[np.uint32]  # of a mask


class ItemTokens:
    """The tokens of a vocabulary by what they can end, as masks.

    `quotes`: a string. `ends`: any other value, or a short string as a whole. `spaces`: a number, by a space.
    `repeats`: an item and the next item or name, so that a token alone can repeat one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self.quotes = self._with(lambda data: b'"' in data)
        self.ends = self._with(_can_end)
        self.spaces = self._with(lambda data: data[:1].isspace())
        self.repeats = self._with(_can_repeat)
        self._with_byte: dict[int, Bits] = {}
        self._with_quotes = sorted((data, token) for token, data in enumerate(self._token_bytes) if b'"' in data)

    def _with(self, holds: Callable[[bytes], bool]) -> Bits:
        """Returns the tokens whose text has a property, as a mask."""
        return pack_mask(np.array([holds(data) for data in self._token_bytes], np.bool_)).view(np.uint32)

    def with_byte(self, byte: int) -> Bits:
        """Returns the tokens that have a byte, as a mask."""
        if byte not in self._with_byte:
            self._with_byte[byte] = self._with(lambda data: byte in data)
        return self._with_byte[byte]

    def with_quotes(self, beginning: bytes) -> list[int]:
        """Returns the tokens that begin with a text in which there is a quote."""
        first = bisect_left(self._with_quotes, (beginning, -1))
        begin_so = takewhile(lambda item: item[0].startswith(beginning), self._with_quotes[first:])
        return [token for _, token in begin_so]


def _tokens_of(bits: Bits) -> list[int]:
    """Returns the tokens of a mask with few of them."""
    tokens: list[int] = []
    for at in np.flatnonzero(bits).tolist():
        word = int(bits[at])
        while word:
            lowest = word & -word
            tokens.append(32 * at + lowest.bit_length() - 1)
            word ^= lowest
    return tokens


def _can_end(data: bytes) -> bool:
    return _ENDING.search(data) is not None


def _can_repeat(data: bytes) -> bool:
    _, comma, rest = data.partition(b",")
    return bool(comma) and (rest.count(b'"') > 1 or (b'"' not in rest and (b":" in rest or _can_end(rest))))


_item_tokens: WeakKeyDictionary[Vocabulary, ItemTokens] = WeakKeyDictionary()


def item_tokens(vocabulary: Vocabulary) -> ItemTokens:
    """Returns the tokens of a vocabulary by what they can end, found once."""
    found = _item_tokens.get(vocabulary)
    if found is None:
        found = _item_tokens[vocabulary] = ItemTokens(vocabulary)
    return found


class UniqueItems:
    """The items and names of one text so far. `text` and the states grow and shrink with the tokens of the matcher.

    control_texts: what the control tokens of the grammar count as in the text.
    """

    def __init__(self, tracker: ItemTracker, vocabulary: Vocabulary, control_texts: Mapping[int, bytes]) -> None:
        self._tracker, self._vocabulary, self._control_texts = tracker, vocabulary, control_texts
        self._tokens = item_tokens(vocabulary)
        self._text = b""
        self._states = [tracker.first_state()]

    def copy(self) -> UniqueItems:
        """Returns a copy that does not know how to go back."""
        other = UniqueItems(self._tracker, self._vocabulary, self._control_texts)
        other._text, other._states = self._text, self._states[-1:]
        return other

    def _bytes_of(self, token: int) -> bytes:
        return self._control_texts.get(token) or self._vocabulary.token_bytes[token]

    def accept(self, token: int) -> None:
        """Appends a token that repeats no item."""
        text = self._text + self._bytes_of(token)
        state = self._tracker.advance(self._states[-1], text)
        assert state is not None, "the token was not checked"
        self._text = text
        self._states.append(state)

    def keep(self, num_tokens: int) -> None:
        """Removes the tokens from number `num_tokens` on."""
        del self._states[num_tokens + 1 :]
        self._text = self._text[: self._states[-1].length]

    def repeats(self, tokens: Iterable[int]) -> bool:
        """Returns whether an item or name would be a repetition after these tokens."""
        return self.repeats_text(b"".join(map(self._bytes_of, tokens)))

    def repeats_text(self, data: bytes) -> bool:
        """Returns whether an item or name would be a repetition after these bytes."""
        return self._tracker.advance(self._states[-1], self._text + data) is None

    def is_blocked(self, token: int, inner: llguidance.LLMatcher) -> bool:
        """Returns whether `token` repeats an item or name, or leads to where only a repetition can follow.

        The second is not searched where many items or names were seen to be possible, such as any strings, but behind
        those that few others continue.
        """
        text = self._text + self._bytes_of(token)
        state = self._tracker.advance(self._states[-1], text)
        if state is None:
            return True
        frame = unique_frame(state)
        if frame is None or not rests_of_seen(state, text):
            return False
        if frame.nodes in self._tracker.with_many_items and not self._narrow_rests(frame, text, None):
            return False
        after = inner.deep_copy()
        return bool(after.consume_token(token)) and not self._can_differ(after, state, text)

    def _narrow_rests(self, frame: Frame, text: bytes, inner: Callable[[], llguidance.LLMatcher] | None) -> list[bytes]:
        """Returns what is missing of each earlier text that begins as the current item or name of a frame, and that few
        others continue: the `red` of the pattern red|x-.*, but not `x-1`.

        inner: the matcher at the end of `text`; None if only what is known is of interest.
        """
        partial, known = text[frame.start :] if frame.start >= 0 else b"", self._tracker.can_go_on
        found: list[bytes] = []
        for item in frame.seen or ():
            if item[:1] != JSON_QUOTE or not item.startswith(partial):
                continue
            key = (frame.nodes, item)
            if key not in known and inner is not None:
                self._find_out(key, inner().deep_copy(), item[len(partial) :].rpartition(JSON_QUOTE)[0])
            if not known.get(key, True):
                found.append(item[len(partial) :])
        return found

    def _find_out(self, key: tuple[Nodes, bytes], inner: llguidance.LLMatcher, text: bytes) -> None:
        """Stores whether many tokens may follow `text`, which the matcher consumes if it stands where it may."""
        tokens = self._vocabulary.encode(text.decode(errors="ignore"))
        if tokens and inner.try_consume_tokens(list(tokens)) < len(tokens):
            return
        if len(self._tracker.can_go_on) >= MAX_KNOWN:
            self._tracker.can_go_on.clear()
        allowed = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8)).sum()
        self._tracker.can_go_on[key] = bool(allowed > MAX_TRIED_TOKENS)

    def _can_differ(self, inner: llguidance.LLMatcher, state: State, text: bytes) -> bool:
        """Returns whether the current item or name can become one that no earlier one equals; True if that is not
        decided."""
        frame = unique_frame(state)
        todo = [(inner, state, text)]
        for _ in range(MAX_TRIED_STATES):
            if not todo:
                return False
            inner, state, text = todo.pop()
            mask = np.frombuffer(bytearray(inner.compute_bitmask()), np.int32)
            tokens = allowed_tokens(mask, self._vocabulary)
            if len(tokens) > MAX_TRIED_TOKENS:
                if frame is not None:
                    self._tracker.with_many_items.add(frame.nodes)
                return True
            for token in tokens:
                longer = text + self._bytes_of(token)
                reached = self._tracker.advance(state, longer)
                if reached is None:
                    continue
                if not rests_of_seen(reached, longer):
                    return True
                after = inner.deep_copy()
                if after.consume_token(token):
                    todo.append((after, reached, longer))
        return bool(todo)

    def forbid_repeated(self, mask: Int32Array, inner: Callable[[], llguidance.LLMatcher]) -> None:
        """Clears the bits of the tokens that are blocked here."""
        bits = mask.view(np.uint32)
        for token in self._suspects(bits[: len(self._tokens.repeats)], inner):
            if bits[token // 32] >> np.uint32(token % 32) & 1 and self.is_blocked(token, inner()):
                bits[token // 32] &= ~np.uint32(1 << (token % 32))

    def _suspects(self, bits: Bits, inner: Callable[[], llguidance.LLMatcher]) -> Iterable[int]:
        """Returns the tokens that may be blocked here; all others are not. `bits`: those that the grammar allows."""
        state, known = self._states[-1], self._tokens
        if state.mode == OUTSIDE:
            return ()
        frame, repeats = unique_frame(state), self._repeating(state)
        if frame is None:
            return _tokens_of(bits & repeats)
        if state.mode == (STRING if frame.is_array else NAME) and np.count_nonzero(bits) > MAX_TRIED_TOKENS:
            self._tracker.with_many_items.add(frame.nodes)
        has_many = frame.nodes in self._tracker.with_many_items
        if has_many and not _has_seen(state.frame):
            return _tokens_of(bits & repeats)
        rests = rests_of_seen(state, self._text)
        narrow = self._narrow_rests(frame, self._text, inner) if has_many else rests
        quote = self._tracker.quote_of(state)
        if quote != JSON_QUOTE:
            ends = known.with_byte(quote[-1]) if state.mode == STRING else known.ends | known.with_byte(quote[-1])
            if not frame.is_array:
                ends = ends | known.with_byte(b":"[0])
            suspects = {*_tokens_of(bits & (ends | repeats)), *self._control_texts}
            return suspects if has_many else suspects | self._beginnings(rests)
        is_alone = frame.is_array or not _has_seen(frame.outer)
        if has_many and is_alone and state.mode in (STRING, NAME) and state.start == frame.start:  # all of it is this
            repeating = _tokens_of(bits & repeats & known.quotes)
            ending = [*repeating, *(token for rest in rests for token in known.with_quotes(rest))]
            return {*ending, *self._beginnings(narrow)}
        ends = known.quotes if state.mode in (STRING, NAME) else known.ends
        if state.mode == SCALAR:
            ends = ends | known.spaces
        return {*_tokens_of(bits & (ends | repeats)), *self._beginnings(narrow)}

    def _repeating(self, state: State) -> Bits:
        """Returns the tokens that may be blocked wherever they stand, as a mask."""
        frame = state.frame
        if frame is None or frame.is_array or not frame.seen or frame.nodes in self._tracker.with_many_items:
            return self._tokens.repeats
        return self._tokens.repeats | self._tokens.with_byte(b","[0])  # behind a comma no name may be left

    def _beginnings(self, rests: list[bytes]) -> set[int]:
        ids, longest = self._vocabulary.ids_by_bytes, self._vocabulary.max_token_bytes
        texts = [*rests, *(b" " + rest for rest in rests)]
        return {
            ids[text[:size]] for text in texts for size in range(1, min(longest, len(text)) + 1) if text[:size] in ids
        }


def _has_seen(frame: Frame | None) -> bool:
    """Returns whether an array or object, or one around it, has a finished item or name that may not be repeated."""
    while frame is not None and not frame.seen:
        frame = frame.outer
    return frame is not None


def allowed_tokens(mask: Int32Array, vocabulary: Vocabulary) -> list[int]:
    """Returns the tokens of a mask that have a text."""
    width = mask_words(len(vocabulary))
    bits = np.flatnonzero(np.unpackbits(mask[:width].view(np.uint8), bitorder="little")).tolist()
    return [token for token in bits if token < len(vocabulary) and vocabulary.token_bytes[token]]


class UniqueItemsWalker(LlguidanceWalker):
    """A walker that repeats no item where it may not."""

    def __init__(
        self, grammar: LlguidanceGrammar, inner: llguidance.LLMatcher, tokens: Sequence[int], items: UniqueItems
    ) -> None:
        super().__init__(grammar, inner, tokens)
        self._items = items

    def forced_tokens(self) -> list[int]:
        forced = super().forced_tokens()
        return [] if self._items.repeats(forced) else forced

    def is_allowed(self, token: int) -> bool:
        return super().is_allowed(token) and not self._items.is_blocked(token, self._inner)

    def advance(self, tokens: Sequence[int]) -> bool:
        if self._items.repeats(tokens) or not super().advance(tokens):
            return False
        for token in tokens:
            self._items.accept(token)
        return True

    def _mask(self) -> Int32Array:
        mask = super()._mask()
        self._items.forbid_repeated(mask, lambda: self._inner)
        return mask
