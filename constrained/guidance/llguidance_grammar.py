"""Grammars run by llguidance, token by token, for constraints that are too large for a token automaton."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import llguidance
import msgspec
import numpy as np

from plait.constrained.grammar import Grammar, Int32Array, Matcher, mask_words
from plait.constrained.guidance.call_tracker import CallTexts, CallTracker, spell_control
from plait.constrained.guidance.inner_matcher import DEAD_END, EMPTY_LANGUAGE, compile_inner_matcher, raise_on_error
from plait.constrained.guidance.item_tracker import ItemTracker
from plait.constrained.guidance.llguidance_matcher import LlguidanceMatcher, UniqueItemsMatcher
from plait.constrained.guidance.unique_items import UniqueItems
from plait.constrained.guidance.unique_paths import UniquePaths
from plait.constrained.json_validation import Segment, json_validation_error, segments_validation_error
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.json_scanner import JsonDelimiters, JsonRegions
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_LITERAL = 16_384  # forced bytes: llguidance tokenizes all of them again at each step, at 0.4 us a byte
BYTES_PER_CHARACTER = 100  # memory of a compiled grammar; measured: a literal of 1 MB takes 86 MB
ASSUMED_BYTES = 2 << 20  # memory of a lexer in ordinary use; llguidance does not report it


class LlguidanceSource(msgspec.Struct, frozen=True, tag="llg"):
    """A grammar in llguidance's notation that is known to compile within the limits."""

    text: str
    unchecked: tuple[str, ...] = ()  # JSON pointers of the schema keywords that the grammar does not enforce
    full_check_schema: str = ""  # a JSON schema that the finished text is validated against, or ""
    segments: tuple[Segment, ...] = ()  # the parts of a structural text, each with its schema
    max_digits: int = 0  # digits of a number in JSON, unless the schema requires more; 0: no bound
    json_delimiters: (
        tuple[tuple[bytes, bytes], ...] | None
    ) = ()  # the markers around each kind of JSON; None: not known
    free_text: bool = False  # whether other text may surround the delimited JSON
    warnings: tuple[str, ...] = ()
    control_tokens: tuple[tuple[str, int], ...] = ()  # (text in `marks`, id) of those that the grammar refers to
    marks: tuple[str, ...] = ()  # texts that begin and end calls and their parts, for completions
    unique_items: str = ""  # a JSON schema whose arrays must not repeat items (unique_paths.py), or ""
    calls: CallTexts | None = None  # the calls of a structural text, if their arrays must not repeat items


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
        self._full_check_schema = source.full_check_schema
        self._segments = source.segments
        self._max_digits = source.max_digits
        delimiters = tuple(JsonDelimiters(begin, end) for begin, end in source.json_delimiters or ())
        self._json_regions = JsonRegions(delimiters, source.free_text, source.json_delimiters is None)
        self.control_texts = {token: spell_control(token) for _, token in source.control_tokens}
        self.marks = [_mark_tokens(mark, source.control_tokens, vocabulary) for mark in source.marks]
        self.initial_completion: list[int] | None = None  # from the start of a text; None until one was found
        self.no_completion_within = -1  # a search from the start of a text found none of at most so many tokens
        self._item_tracker: ItemTracker | None = None
        if source.unique_items:
            self._item_tracker = ItemTracker(UniquePaths(json.loads(source.unique_items)))
        elif source.calls is not None:
            self._item_tracker = CallTracker(source.calls)
        self._prototype = compile_inner_matcher(self._text, vocabulary)
        self._prototype.compute_ff_bytes()  # once, here: copies take over what is forced at the start of a text
        try:
            matcher = self.matcher()
            forced = matcher.forced_bytes()
            if len(forced) > MAX_LITERAL:
                raise GrammarError(f"it forces more than {MAX_LITERAL} bytes at once, which would slow down each token")
            self.masks = MaskCache(self.num_words, forced, vocabulary.token_bytes)
            matcher.fill_mask(np.zeros(self.num_words, np.int32))  # stored as that of every text
        except GrammarError as error:
            raise GrammarError(EMPTY_LANGUAGE if error.reason == DEAD_END else error.reason) from None

    @property
    def nbytes(self) -> int:
        return ASSUMED_BYTES + self.masks.max_bytes + BYTES_PER_CHARACTER * len(self._text)

    def matcher(self) -> Matcher:
        if self._item_tracker is None:
            return LlguidanceMatcher(self)
        return UniqueItemsMatcher(self, UniqueItems(self._item_tracker, self.vocabulary, self.control_texts))

    def check(self, text: str) -> str | None:
        if self.unchecked and self._segments:
            return segments_validation_error(self._segments, text)
        return json_validation_error(self._full_check_schema, text) if self._full_check_schema else None

    def is_at_digit_limit(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of `tokens` ends in a JSON number that has the maximum number of digits."""
        if not self._max_digits:
            return False
        limiter = self.vocabulary.number_limiter
        return limiter.is_at_digit_limit(tokens, self._max_digits, self._json_regions, self.control_texts)

    def new_inner_matcher(self) -> llguidance.LLMatcher:
        """Returns llguidance's matcher at the start of a text; it shares its lexer with the other matchers."""
        return self._prototype.deep_copy()

    def rebuild_inner_matcher(self, tokens: list[int]) -> llguidance.LLMatcher:
        """Returns a matcher after `tokens` with a new lexer, which matchers made later share. Raises GrammarError."""
        self._prototype = compile_inner_matcher(self._text, self.vocabulary)
        inner = self._prototype.deep_copy()
        if tokens:
            inner.consume_tokens(tokens)
        return raise_on_error(inner)


def _mark_tokens(mark: str, control_tokens: Sequence[tuple[str, int]], vocabulary: Vocabulary) -> list[int]:
    """Returns the tokens of a mark, in which some texts are control tokens."""
    ids = dict(sorted(control_tokens, key=lambda pair: -len(pair[0])))
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", mark) if ids else [mark]
    return [token for part in parts for token in ([ids[part]] if part in ids else vocabulary.encode(part))]


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


def regex_source(pattern: str, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles a plain pattern (see regex/python_syntax.py). Raises GrammarError if it does not compile.

    >>> regex_source("[a-z]{1,90000}", vocabulary)                          # doctest: +SKIP
    """
    return ensure_compiles(LlguidanceSource(llguidance.LLMatcher.grammar_from_regex(pattern)), vocabulary)


# -- mask cache -----------------------------------------------------------------------------------
# Keeps the masks of a grammar at the beginning that all its texts have in common.

MAX_MASKS = 24
SLOW_S = 50e-6  # a mask that took longer is kept; most take less than 5 us, and finding one takes 0.2 us


class MaskCache:
    """The mask at the start of a text, and at most `MAX_MASKS` - 1 slow ones within `forced`, of `num_words` int32.

    forced: the bytes with which every text of the grammar begins. token_bytes: of all tokens. Texts of all users share
    the masks, so that none is kept after bytes that a model has chosen: it would be faster the second time, which tells
    one user how a value of another one began.

    >>> masks = MaskCache(1, b"{", (b"{", b"a"))
    >>> masks.put([0], np.array([7], np.int32), seconds=0.001)            # doctest: +SKIP
    >>> masks.get([0])                                                    # doctest: +SKIP
    array([7], dtype=int32)
    """

    def __init__(self, num_words: int, forced: bytes, token_bytes: Sequence[bytes]) -> None:
        self.max_bytes = 4 * num_words * MAX_MASKS
        self.slow_s = SLOW_S
        self._forced, self._token_bytes = forced, token_bytes
        self._initial: Int32Array | None = None
        self._masks: dict[tuple[int, ...], Int32Array] = {}

    def get(self, tokens: Sequence[int]) -> Int32Array | None:
        """Returns the mask after `tokens`, int32 [num_words], not to be changed; None if it is not kept."""
        if not tokens:
            return self._initial
        return self._masks.get(tuple(tokens)) if self._masks and len(tokens) <= len(self._forced) else None

    def put(self, tokens: Sequence[int], mask: Int32Array, seconds: float) -> None:
        """Keeps a copy of the mask after `tokens` if they are none, or if all texts begin so and it took long."""
        if not tokens:
            self._initial = mask.copy()
        elif seconds > self.slow_s and len(self._masks) < MAX_MASKS - 1 and self._is_forced(tokens):
            self._masks[tuple(tokens)] = mask.copy()

    def _is_forced(self, tokens: Sequence[int]) -> bool:
        if len(tokens) > len(self._forced):
            return False
        return self._forced.startswith(b"".join(self._token_bytes[token] for token in tokens))
