"""A constrained value with known text after it: the value may end only where that text can follow.

    value  42        the inner matcher's text
    text   " legs."  the text that follows; it competes with the value's next token under one mask

A token may span the border: `",` ends a string and begins the text ",".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.constrained.grammar import Int32Array, Matcher, mask_of, mask_words, set_bits
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_SPANNED_BYTES = 16  # bytes of the text in a token that spans the border
MAX_SPANNING_TRIED = 256  # spanning tokens that one mask tries, those with the lowest ids; about 2 us each


class _Spanning(NamedTuple):
    """A token that spells the end of a value, as `value_token` does, and then `length` bytes of the text."""

    token: int
    value_token: int
    length: int


class TrailingText:
    """A text that follows a value, and the tokens of one vocabulary that spell it. Not empty.

    >>> FollowingText(" legs.", vocabulary).tokens                        # doctest: +SKIP
    [8049, 30]
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.data = text.encode()
        self.vocabulary = vocabulary
        self.eos_mask = mask_of(vocabulary.eos_ids, len(vocabulary))  # read-only
        self._tokenizations: dict[int, list[int]] = {}
        self.tokens = self.tokenization(0)
        self.tokens_at = [self._tokens_at(start) for start in range(len(self.data))]  # that continue it at a byte
        self.spanning = self._find_spanning()
        self.spanned_value_tokens = np.array([entry.value_token for entry in self.spanning], np.int64)

    def tokenization(self, start: int) -> list[int]:
        """Returns tokens that spell the text from byte `start` on, as the tokenizer splits it where it can."""
        known = self._tokenizations.get(start)
        if known is None:
            known = self._tokenizations[start] = self.vocabulary.spell(self.data[start:])
        return known

    def _tokens_at(self, start: int) -> list[int]:
        ids, longest = self.vocabulary.ids_by_bytes, self.vocabulary.max_token_bytes
        ends = range(start + 1, min(len(self.data), start + longest) + 1)
        tokens = [ids[self.data[start:end]] for end in ends if self.data[start:end] in ids]
        return [*tokens, *self.tokenization(start)[:1]]

    def _find_spanning(self) -> list[_Spanning]:
        """Returns the tokens that end with a beginning of the text, after something that is a token too."""
        ids, found = self.vocabulary.ids_by_bytes, list[_Spanning]()
        for length in range(1, min(len(self.data), MAX_SPANNED_BYTES) + 1):
            head = self.data[:length]
            for token in self.vocabulary.ids_by_last_byte[head[-1]].tolist():
                data = self.vocabulary.token_bytes[token]
                if len(data) > length and data.endswith(head) and data[:-length] in ids:
                    found.append(_Spanning(token, ids[data[:-length]], length))
        return sorted(found)


class TrailingTextMatcher(Matcher):
    """The state of a value under `inner` and of the text after it. The text that it matches is value + text.

    Where the text is complete, the value has ended, unless it could only go on: after "3." a number may continue
    with digits or have ended before the text ".". See `may_end`.
    """

    __slots__ = ("_history", "_inner", "_is_open", "_num_eos", "_starts", "_trailing_text")

    def __init__(self, inner: Matcher, trailing_text: TrailingText) -> None:
        self._inner = inner
        self._trailing_text = trailing_text
        self._is_open = True  # all tokens so far may belong to the value
        self._starts: frozenset[int] = frozenset()  # bytes of the text so far, for each place where the value may end
        self._history: list[tuple[bool, frozenset[int]]] = []  # (is_open, starts) before each accepted token
        self._num_eos = 0

    @property
    def num_trailing_bytes(self) -> int:
        """Bytes at the end that may belong to the text after the value."""
        return max(self._starts, default=0)

    @property
    def may_end(self) -> bool:
        """Whether the text is complete, but its bytes may also be the middle of a longer value.

        The mask cannot decide this: the caller samples among all tokens, and the value continues if that token can
        continue it.
        """
        return self._is_text_complete and not self._has_ended

    def accept(self, token: int) -> bool:
        vocabulary = self._trailing_text.vocabulary
        if token in vocabulary.eos_ids:
            if not self.is_accepting:
                return False
            self._num_eos += 1
            return True
        data = vocabulary.token_bytes[token] if 0 <= token < len(vocabulary) else b""
        if self._num_eos or not data or self._has_ended:
            return False
        starts = frozenset[int]() if self._inner.is_reasoning else self._starts_after(data)
        is_open = self._is_open and self._inner.accept(token)
        if not is_open and not starts:
            return False
        self._history.append((self._is_open, self._starts))
        self._is_open, self._starts = is_open, starts
        return True

    def _starts_after(self, data: bytes) -> frozenset[int]:
        """Returns how many bytes of the text there are after `data`, for each place where the value may end."""
        text = self._trailing_text.data
        starts = {start + len(data) for start in self._text_starts() if text.startswith(data, start)}
        if self._is_open:
            for length in range(1, min(len(data) - 1, len(text), MAX_SPANNED_BYTES) + 1):
                if data.endswith(text[:length]) and self._completes_value(data[:-length]):
                    starts.add(length)
        return frozenset(starts)

    def _text_starts(self) -> list[int]:
        """Returns the positions in the text at which the next token may continue it."""
        starts = [start for start in self._starts if start < len(self._trailing_text.data)]
        return [0, *starts] if self._is_open and self._inner.is_accepting else starts

    def _completes_value(self, data: bytes) -> bool:
        token = self._trailing_text.vocabulary.ids_by_bytes.get(data)
        return token is not None and self._token_completes_value(token)

    def _token_completes_value(self, token: int) -> bool:
        if not self._inner.accept(token):
            return False
        is_complete = self._inner.is_accepting
        self._inner.rollback(1)
        return is_complete

    @property
    def num_reasoning_tokens(self) -> int:
        return self._inner.num_reasoning_tokens

    @property
    def is_reasoning(self) -> bool:
        return self._inner.is_reasoning

    def fill_mask(self, row: Int32Array) -> None:
        trailing_text = self._trailing_text
        if self._inner.is_reasoning:
            self._inner.fill_mask(row)
            return
        if self._num_eos or self._has_ended:
            row[:] = trailing_text.eos_mask
            return
        row.fill(0)
        if self._is_open:
            self._inner.fill_mask(row)
            spanning = self._allowed_spanning(row)
            row &= ~trailing_text.eos_mask  # the value may not end without the text
            set_bits(row, spanning)
        for start in self._text_starts():
            set_bits(row, trailing_text.tokens_at[start])
        if self._is_text_complete:
            row |= trailing_text.eos_mask

    def _allowed_spanning(self, inner_mask: Int32Array) -> list[int]:
        """Returns the tokens that end the value and begin the text. `inner_mask`: the mask of the value alone."""
        values = self._trailing_text.spanned_value_tokens
        bits = inner_mask.view(np.uint32)[values // 32] >> (values % 32).astype(np.uint32) & 1
        tried = np.flatnonzero(bits)[:MAX_SPANNING_TRIED].tolist()
        complete: dict[int, bool] = {}
        allowed = []
        for index in tried:
            token, value_token, _ = self._trailing_text.spanning[index]
            if value_token not in complete:
                complete[value_token] = self._token_completes_value(value_token)
            if complete[value_token]:
                allowed.append(token)
        return allowed

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._history) + self._num_eos:
            raise ValueError(f"cannot roll back {n} tokens of {len(self._history) + self._num_eos}")
        num_eos = min(n, self._num_eos)
        self._num_eos -= num_eos
        num_inner = 0
        for _ in range(n - num_eos):
            num_inner += self._is_open
            self._is_open, self._starts = self._history.pop()
        self._inner.rollback(num_inner)

    def forced_bytes(self) -> bytes:
        start = self._only_start()
        if start is not None:
            return self._trailing_text.data[start:]
        return self._inner.forced_bytes() if self._must_continue_value() else b""

    def forced_tokens(self) -> list[int]:
        start = self._only_start()
        if start is not None:
            return list(self._trailing_text.tokenization(start))
        return self._inner.forced_tokens() if self._must_continue_value() else []

    @property
    def is_in_text(self) -> bool:
        """Whether the value has ended and only the rest of the text can follow."""
        return self._only_start() is not None

    def _must_continue_value(self) -> bool:
        return self._is_open and not self._num_eos and not self._starts and not self._inner.is_accepting

    def _only_start(self) -> int | None:
        """Returns where in the text the next token begins, if it can be nothing else."""
        starts = self._text_starts()
        if self._num_eos or self._is_text_complete or len(starts) != 1:
            return None
        return None if self._is_open and self._can_continue_value() else starts[0]

    def _can_continue_value(self) -> bool:
        row = np.zeros(mask_words(len(self._trailing_text.vocabulary)), np.int32)
        self._inner.fill_mask(row)
        return bool((row & ~self._trailing_text.eos_mask).any())

    def completion(self, limit: int) -> list[int] | None:
        """See `Matcher`. `limit` is for the tokens of the value; those of the text come in addition."""
        if self._num_eos or self._is_text_complete:
            return []
        if self._starts:
            return list(self._trailing_text.tokenization(max(self._starts)))
        value = self._inner.completion(limit)
        return None if value is None else [*value, *self._trailing_text.tokens]

    @property
    def is_accepting(self) -> bool:
        return self._num_eos > 0 or self._is_text_complete

    @property
    def is_terminated(self) -> bool:
        return self._num_eos > 0

    @property
    def _is_text_complete(self) -> bool:
        return len(self._trailing_text.data) in self._starts

    @property
    def _has_ended(self) -> bool:
        return self._is_text_complete and (not self._is_open or self._inner.is_accepting)
