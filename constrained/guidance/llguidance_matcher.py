"""The state of one text under an LlguidanceGrammar."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import llguidance
import numpy as np

from plait.constrained.grammar import Int32Array, Matcher
from plait.constrained.guidance.completion_walker import LlguidanceWalker, remaining_completions
from plait.constrained.guidance.inner_matcher import DEAD_END, LEXER_ERROR, raise_on_error
from plait.constrained.guidance.unique_items import UniqueItems, UniqueItemsWalker
from plait.constrained.specs import GrammarError

if TYPE_CHECKING:
    from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar

T = TypeVar("T")
CONTROL_TOKEN = b"\xff"  # before the id of a control token in what llguidance forces; no text has this byte
RETOKENIZE_SLACK = 64  # tokens by which retokenizing may shorten a completion


class LlguidanceMatcher(Matcher):
    """The state of one text under an LlguidanceGrammar.

    Where the text is forced, masks allow only the tokens into which the tokenizer splits it.
    """

    __slots__ = (
        "_accepted_since",
        "_address",
        "_bits",
        "_completion",
        "_grammar",
        "_inner",
        "_mask",
        "_num_eos",
        "_tokens",
        "_words",
    )

    def __init__(self, grammar: LlguidanceGrammar) -> None:
        self._grammar = grammar
        self._inner = grammar.new_inner_matcher()
        self._tokens: list[int] = []  # the tokens that the inner matcher consumed
        self._completion = grammar.initial_completion  # the last completion found
        self._accepted_since: list[int] = []  # tokens accepted since it was found
        self._num_eos = 0  # end tokens accepted; the inner matcher never sees them
        self._bits = bytearray()  # llguidance writes masks here
        self._words = np.zeros(0, np.int32)  # a view of the same memory
        self._address = 0  # of that memory; 0 before the first mask
        self._mask: Int32Array | None = None  # the mask after `_tokens`, if it was filled

    def accept(self, token: int) -> bool:
        grammar = self._grammar
        if token in grammar.eos_ids:
            if not self.is_accepting:
                return False
            self._num_eos += 1
            return True
        if self._num_eos or not 0 <= token < len(grammar.vocabulary):
            return False
        if not grammar.vocabulary.token_bytes[token] and token not in grammar.control_texts:
            return False
        if self._continues_long_number(token):
            return False
        if not self._is_allowed(token) or not self._query(lambda inner: inner.consume_token(token)):
            return False
        self._tokens.append(token)
        self._mask = None
        if self._completion is not None:
            self._accepted_since.append(token)
        return True

    def fill_mask(self, row: Int32Array) -> None:
        grammar = self._grammar
        known = None if self._num_eos else grammar.masks.get(self._tokens)
        if known is not None:
            row[:] = self._mask = known
            return
        self._mask = None
        start = perf_counter()
        is_accepting = self.is_accepting
        if not self._address:
            self._bits = bytearray(grammar.empty_mask)
            self._words = np.frombuffer(self._bits, np.int32)
            self._address = self._words.ctypes.data
        bits = self._bits
        if self._num_eos or self._inner.is_stopped():
            bits[:] = grammar.empty_mask
        else:
            size = len(bits)
            self._query(lambda inner: inner.unsafe_compute_mask_ptr(self._address, size))
            if not is_accepting and bits == grammar.empty_mask:
                raise GrammarError(DEAD_END)
        for byte, bit, other_bits in grammar.eos_bits:
            bits[byte] = bits[byte] | bit if is_accepting else bits[byte] & other_bits
        if grammar.is_at_digit_limit(self._tokens):
            grammar.vocabulary.number_limiter.forbid_continuation(self._words)
        row[:] = self._words
        if not self._num_eos:
            self._mask = self._words
            grammar.masks.put(self._tokens, self._words, perf_counter() - start)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._tokens) + self._num_eos:
            raise ValueError(f"cannot roll back {n} tokens of {len(self._tokens) + self._num_eos}")
        num_eos = min(n, self._num_eos)
        self._num_eos -= num_eos
        num_inner = n - num_eos
        if num_inner:
            self._mask = None
            del self._tokens[-num_inner:]
            if len(self._accepted_since) < num_inner:
                self._completion, self._accepted_since = None, []
            else:
                del self._accepted_since[-num_inner:]
            if not self._inner.rollback(num_inner):
                self._inner = self._grammar.rebuild_inner_matcher(self._tokens)

    def forced_bytes(self) -> bytes:
        if self.is_accepting:
            return b""
        forced = self._query(lambda inner: bytes(inner.compute_ff_bytes()))
        return forced.partition(CONTROL_TOKEN)[0] if self._grammar.control_texts else forced

    def forced_tokens(self) -> list[int]:
        return [] if self.is_accepting else self._query(lambda inner: list(inner.compute_ff_tokens()))

    def completion(self, limit: int) -> list[int] | None:
        if self.is_accepting:
            return []
        completion = self._reusable_completion()
        if completion is None or len(completion) > limit:
            completion = self._search_completion(limit)
        self._completion, self._accepted_since = completion, []
        return None if completion is None or len(completion) > limit else list(completion)

    def _reusable_completion(self) -> list[int] | None:
        """Returns what is left of the last completion found, if it still completes the text; else None."""
        if self._completion is None or not self._accepted_since:
            return self._completion
        candidates = remaining_completions(self._completion, self._accepted_since, self._grammar.vocabulary)
        return next((candidate for candidate in candidates if self._is_completion(candidate)), None)

    def _is_completion(self, tokens: list[int]) -> bool:
        """Returns whether the text is complete and valid after `tokens`."""
        with_eos = [*tokens, self._grammar.vocabulary.eos_ids[0]]  # an end token is valid after a complete text only
        is_complete = self._query(lambda inner: inner.validate_tokens(with_eos) == len(with_eos))
        return is_complete and not self._exceeds_digit_limit(tokens)

    def _exceeds_digit_limit(self, tokens: list[int]) -> bool:
        """Returns whether `tokens` begin with more digits than the number at the end of the text may still have."""
        digits = list(takewhile(self._grammar.vocabulary.number_limiter.continues_number, tokens))
        return any(self._grammar.is_at_digit_limit([*self._tokens, *digits[:n]]) for n in range(len(digits)))

    def _search_completion(self, limit: int) -> list[int] | None:
        """Searches a completion of the text; the result at the start of a text is kept for all matchers."""
        grammar = self._grammar
        if not self._tokens and limit <= grammar.no_completion_within:
            return None
        tokens = grammar.vocabulary.completion_search.search(self._new_walker, limit + RETOKENIZE_SLACK)
        completion = None if tokens is None else self._retokenize(tokens)
        if not self._tokens and completion is not None:
            grammar.initial_completion = completion
        elif not self._tokens:
            grammar.no_completion_within = limit
        return completion

    def _new_walker(self) -> LlguidanceWalker:
        return LlguidanceWalker(self._grammar, self._inner.deep_copy(), self._tokens)

    def _continues_long_number(self, token: int) -> bool:
        """Returns whether the token would continue a number that must end here."""
        grammar = self._grammar
        if not grammar.vocabulary.number_limiter.continues_number(token) or not grammar.is_at_digit_limit(self._tokens):
            return False
        mask = np.zeros(grammar.num_words, np.int32)
        self.fill_mask(mask)
        return not mask.view(np.uint32)[token // 32] >> (token % 32) & 1

    def _retokenize(self, tokens: list[int]) -> list[int]:
        """Returns the tokenizer's own tokens for the text of `tokens` if they are fewer and allowed; else `tokens`."""
        vocabulary = self._grammar.vocabulary
        if not self._grammar.control_texts.keys().isdisjoint(tokens):
            return tokens
        text = vocabulary.text_of(tokens).decode(errors="replace")
        retokenized = list(vocabulary.encode(text))
        inner = self._inner.deep_copy()
        if len(retokenized) >= len(tokens) or inner.try_consume_tokens(retokenized) < len(retokenized):
            return tokens
        return retokenized if inner.is_accepting() else tokens

    @property
    def is_accepting(self) -> bool:
        return self._num_eos > 0 or self._query(lambda inner: bool(inner.is_accepting()))

    @property
    def is_terminated(self) -> bool:
        return self._num_eos > 0

    def _is_allowed(self, token: int) -> bool:
        """Returns whether the text may continue with `token`: its mask says so, or else llguidance, which takes as long
        as to consume it: 14 ms before the names of 4,000 optional properties.

        A lexer that another text has driven to its limit allows no token, and only consuming one tells why.
        """
        if self._mask is not None and self._mask[token // 32] >> token % 32 & 1:
            return True
        if self._query(lambda inner: inner.validate_tokens([token]) == 1):
            return True
        probe = self._inner.deep_copy()
        probe.consume_token(token)
        if not str(probe.get_error()).startswith(LEXER_ERROR):
            return False
        self._inner = self._grammar.rebuild_inner_matcher(self._tokens)
        return self._query(lambda inner: bool(inner.validate_tokens([token]) == 1))

    def _query(self, operation: Callable[[llguidance.LLMatcher], T]) -> T:
        """Returns `operation(inner matcher)`, retried once with a new lexer. Raises GrammarError if both fail."""
        result = operation(self._inner)
        if self._inner.is_error():
            self._inner = self._grammar.rebuild_inner_matcher(self._tokens)
            result = operation(self._inner)
            raise_on_error(self._inner)
        return result


class UniqueItemsMatcher(LlguidanceMatcher):
    """An LlguidanceMatcher that forbids repeated items in arrays whose schema has `uniqueItems`."""

    __slots__ = ("_items",)

    def __init__(self, grammar: LlguidanceGrammar, items: UniqueItems) -> None:
        super().__init__(grammar)
        self._items = items

    def accept(self, token: int) -> bool:
        if token in self._grammar.eos_ids or not 0 <= token < len(self._grammar.vocabulary):
            return super().accept(token)
        if not self._is_allowed(token) or self._items.repeats([token]) or not super().accept(token):
            return False
        self._items.accept(token)
        return True

    def fill_mask(self, row: Int32Array) -> None:
        super().fill_mask(row)
        if self._num_eos == 0:
            self._items.forbid_repeated(row, lambda: self._inner)
            if not row.any():
                raise GrammarError(DEAD_END)

    def rollback(self, n: int) -> None:
        super().rollback(n)
        self._items.keep(len(self._tokens))

    def forced_bytes(self) -> bytes:
        forced = super().forced_bytes()
        return b"" if self._items.repeats_text(forced) else forced

    def forced_tokens(self) -> list[int]:
        forced = super().forced_tokens()
        return [] if self._items.repeats(forced) else forced

    def _is_completion(self, tokens: list[int]) -> bool:
        return super()._is_completion(tokens) and not self._items.repeats(tokens)

    def _new_walker(self) -> LlguidanceWalker:
        return UniqueItemsWalker(self._grammar, self._inner.deep_copy(), self._tokens, self._items.copy())
