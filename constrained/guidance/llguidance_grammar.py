"""Grammars run by llguidance, token by token, for constraints that are too large for a token automaton.

Three properties of llguidance shape this code. A matcher that is given an invalid token stays in an error state, so
each token is validated before it is consumed. Copies of a matcher share one lexer; when one text drives the lexer to a
limit, all copies fail, and each then continues with a new lexer. Forced bytes are tokenized with `Vocabulary.encode`,
which must be the model's own tokenizer, or the masks are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import llguidance
import msgspec
import numpy as np

from plait.constrained.full_validation import Segment, json_validation_error, segments_validation_error
from plait.constrained.grammar import Grammar, Int32Array, Matcher, mask_words
from plait.constrained.guidance.completion_walker import LlguidanceWalker, remaining_completions
from plait.constrained.guidance.item_tracker import ItemTracker
from plait.constrained.guidance.json_scanner import JsonDelimiters, JsonRegions
from plait.constrained.guidance.llguidance_tokenizer import tokenizer_of
from plait.constrained.guidance.unique_items import UniqueItems, UniqueItemsWalker
from plait.constrained.json_schema.unique_paths import UniquePaths
from plait.constrained.specs import GrammarError
from plait.constrained.vocabulary import Vocabulary

T = TypeVar("T")
MAX_REASON = 200  # characters of an error text
MAX_LITERAL = 16_384  # forced bytes: llguidance tokenizes all of them again at each step, at 0.4 us a byte
RETOKENIZE_SLACK = 64  # tokens by which retokenizing may shorten a completion
_DEAD_END = "the constraint cannot be met from here on"
_EMPTY_LANGUAGE = "no text of this constraint can be written in tokens of the vocabulary"
BYTES_PER_CHARACTER = 100  # memory of a compiled grammar; measured: a literal of 1 MB takes 86 MB
ASSUMED_BYTES = 2 << 20  # memory of a lexer in ordinary use; llguidance does not report it


class LlguidanceSource(msgspec.Struct, frozen=True, tag="llg"):
    """A grammar in llguidance's notation that is known to compile within the limits."""

    text: str
    unchecked: tuple[str, ...] = ()  # JSON pointers of the schema keywords that the grammar does not enforce
    full_check_schemas: tuple[str, ...] = ()  # JSON schemas that the finished text is validated against
    segments: tuple[Segment, ...] = ()  # the parts of a structural text, each with its schema
    max_digits: int = 0  # digits of a number in JSON, unless the schema requires more; 0: no bound
    json_delimiters: tuple[tuple[str, str], ...] = ()  # the markers before and after each kind of JSON in the text
    free_text: bool = False  # whether other text may surround the delimited JSON
    warnings: tuple[str, ...] = ()
    unique_items: str = ""  # a JSON schema whose arrays must not repeat items (json_schema/unique_paths.py), or ""


class LlguidanceGrammar(Grammar):
    """The grammar of `source` for `vocabulary`.

    The constructor compiles it, which takes milliseconds for a source that a worker process has compiled before, and an
    unknown time for any other. Raises GrammarError if it does not compile, exceeds a limit, or if no token of the
    vocabulary can begin its text.

    >>> LlguidanceGrammar(LlguidanceSource(LLMatcher.grammar_from_regex("[0-9]+")), vocabulary)      # doctest: +SKIP
    """

    def __init__(self, source: LlguidanceSource, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.num_words = mask_words(len(vocabulary))
        self.empty_mask = bytes(4 * self.num_words)
        # For each end token: its byte in a mask, its bit in that byte, and the other bits of the byte.
        self.eos_bits = [(eos_id // 8, 1 << eos_id % 8, 255 - (1 << eos_id % 8)) for eos_id in vocabulary.eos_ids]
        self._text = source.text
        self.unchecked = source.unchecked
        self.warnings = source.warnings
        self._full_check_schemas = source.full_check_schemas
        self._segments = source.segments
        self._max_digits = source.max_digits
        delimiters = tuple(JsonDelimiters(begin.encode(), end.encode()) for begin, end in source.json_delimiters)
        self._json_regions = JsonRegions(delimiters, source.free_text)
        self.initial_completion: list[int] | None = None  # from the start of a text; None until one was found
        self.no_completion_within = -1  # a search from the start of a text found none of at most so many tokens
        self._item_tracker = ItemTracker(UniquePaths(json.loads(source.unique_items))) if source.unique_items else None
        self.initial_mask: Int32Array | None = None  # None until it was computed
        self._prototype = self._compile_inner_matcher()
        try:
            matcher = self.matcher()
            if len(matcher.forced_bytes()) > MAX_LITERAL:
                raise GrammarError(f"it forces more than {MAX_LITERAL} bytes at once, which would slow down each token")
            row = np.zeros(self.num_words, np.int32)
            matcher.fill_mask(row)
            self.initial_mask = row  # of every text
        except GrammarError as error:
            raise GrammarError(_EMPTY_LANGUAGE if error.reason == _DEAD_END else error.reason) from None

    @property
    def nbytes(self) -> int:
        return ASSUMED_BYTES + BYTES_PER_CHARACTER * len(self._text)

    def matcher(self) -> Matcher:
        if self._item_tracker is None:
            return LlguidanceMatcher(self)
        return UniqueItemsMatcher(self, UniqueItems(self._item_tracker, self.vocabulary))

    def check(self, text: str) -> str | None:
        if self.unchecked and self._segments:
            return segments_validation_error(self._segments, text)
        return next(
            (error for schema in self._full_check_schemas if (error := json_validation_error(schema, text))), None
        )

    def is_at_digit_limit(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of `tokens` ends in a JSON number that has the maximum number of digits."""
        if not self._max_digits:
            return False
        return self.vocabulary.number_limiter.is_at_digit_limit(tokens, self._max_digits, self._json_regions)

    def new_inner_matcher(self) -> llguidance.LLMatcher:
        """Returns llguidance's matcher at the start of a text; it shares its lexer with the other matchers."""
        return self._prototype.deep_copy()

    def rebuild_inner_matcher(self, tokens: list[int]) -> llguidance.LLMatcher:
        """Returns a matcher after `tokens` with a new lexer, which matchers made later share. Raises GrammarError."""
        self._prototype = self._compile_inner_matcher()
        inner = self._prototype.deep_copy()
        if tokens:
            inner.consume_tokens(tokens)
        return _raise_on_error(inner)

    def _compile_inner_matcher(self) -> llguidance.LLMatcher:
        tokenizer = tokenizer_of(self.vocabulary)
        return _raise_on_error(llguidance.LLMatcher(tokenizer, self._text, log_level=0, limits=_limits()))


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

    def accept(self, token: int) -> bool:
        grammar = self._grammar
        if token in grammar.eos_ids:
            if not self.is_accepting:
                return False
            self._num_eos += 1
            return True
        if self._num_eos or not 0 <= token < len(grammar.vocabulary) or not grammar.vocabulary.token_bytes[token]:
            return False
        if self._continues_long_number(token):
            return False
        if not self._query(lambda inner: inner.validate_tokens([token]) == 1 and inner.consume_token(token)):
            return False
        self._tokens.append(token)
        if self._completion is not None:
            self._accepted_since.append(token)
        return True

    def fill_mask(self, row: Int32Array) -> None:
        grammar = self._grammar
        if grammar.initial_mask is not None and not self._tokens and not self._num_eos:
            row[:] = grammar.initial_mask
            return
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
                raise GrammarError(_DEAD_END)
        for byte, bit, other_bits in grammar.eos_bits:
            bits[byte] = bits[byte] | bit if is_accepting else bits[byte] & other_bits
        if grammar.is_at_digit_limit(self._tokens):
            grammar.vocabulary.number_limiter.forbid_continuation(self._words)
        row[:] = self._words

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._tokens) + self._num_eos:
            raise ValueError(f"cannot roll back {n} tokens of {len(self._tokens) + self._num_eos}")
        num_eos = min(n, self._num_eos)
        self._num_eos -= num_eos
        num_inner = n - num_eos
        if num_inner:
            del self._tokens[-num_inner:]
            if len(self._accepted_since) < num_inner:
                self._completion, self._accepted_since = None, []
            else:
                del self._accepted_since[-num_inner:]
            if not self._inner.rollback(num_inner):
                self._inner = self._grammar.rebuild_inner_matcher(self._tokens)

    def forced_bytes(self) -> bytes:
        return b"" if self.is_accepting else self._query(lambda inner: bytes(inner.compute_ff_bytes()))

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
        grammar = self._grammar
        return LlguidanceWalker(self._inner.deep_copy(), grammar.vocabulary, self._tokens, grammar.is_at_digit_limit)

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
        text = b"".join(vocabulary.token_bytes[token] for token in tokens).decode(errors="replace")
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

    def _query(self, operation: Callable[[llguidance.LLMatcher], T]) -> T:
        """Returns `operation(inner matcher)`, retried once with a new lexer. Raises GrammarError if both fail."""
        result = operation(self._inner)
        if self._inner.is_error():
            self._inner = self._grammar.rebuild_inner_matcher(self._tokens)
            result = operation(self._inner)
            _raise_on_error(self._inner)
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
        is_allowed = self._query(lambda inner: inner.validate_tokens([token]) == 1)
        if not is_allowed or self._items.repeats([token]) or not super().accept(token):
            return False
        self._items.accept(token)
        return True

    def fill_mask(self, row: Int32Array) -> None:
        super().fill_mask(row)
        if self._num_eos == 0:
            self._items.forbid_repeated(row, lambda: self._inner)
            if not row.any():
                raise GrammarError(_DEAD_END)

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
        grammar, inner = self._grammar, self._inner.deep_copy()
        return UniqueItemsWalker(inner, grammar.vocabulary, self._tokens, grammar.is_at_digit_limit, self._items.copy())


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=5_000_000,  # 50,000 listed values take half of it, 0.1 s
        step_lexer_fuel=400_000,  # at most 30 ms in one step
        step_max_items=20_000,
        max_items_in_row=20_000,  # the bound on a step holds for each row of it
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _raise_on_error(inner: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """Returns `inner`, or raises GrammarError with the first line of its error."""
    if inner.is_error():
        raise GrammarError(_first_line(inner.get_error()))
    return inner


def _first_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip() and line != "<non-verbose/>"]
    reason = lines[0] if lines else "llguidance gave up"
    return _EMPTY_LANGUAGE if reason.startswith("NoExtension") else reason[:MAX_REASON]


def ensure_compiles(
    source: LlguidanceSource, vocabulary: Vocabulary, begins: tuple[bytes, ...] = ()
) -> LlguidanceSource:
    """Returns `source` if it compiles. Raises GrammarError if it does not.

    begins: texts of one token, each of which may be followed by more alternatives than llguidance follows at once; this
    too raises GrammarError.

    >>> ensure_compiles(LlguidanceSource(LLMatcher.grammar_from_lark('start: "a"')), vocabulary)     # doctest: +SKIP
    """
    grammar, row = LlguidanceGrammar(source, vocabulary), np.zeros(mask_words(len(vocabulary)), np.int32)
    for text in begins:
        matcher, token = grammar.matcher(), vocabulary.ids_by_bytes.get(text)
        if token is not None and matcher.accept(token):
            matcher.fill_mask(row)
    return source


def is_invalid_grammar(text: str) -> bool:
    """Returns whether llguidance refuses a grammar in its notation, whatever the vocabulary."""
    return bool(llguidance.LLMatcher.validate_grammar(text, limits=_limits()))


def regex_source(pattern: str, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles a plain pattern (see regex/python_syntax.py). Raises GrammarError if it does not compile.

    >>> regex_source("[a-z]{1,90000}", vocabulary)                          # doctest: +SKIP
    """
    return ensure_compiles(LlguidanceSource(llguidance.LLMatcher.grammar_from_regex(pattern)), vocabulary)
