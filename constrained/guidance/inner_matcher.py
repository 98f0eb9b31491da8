"""Makes llguidance's tokenizers and its matchers, within limits, and turns their errors into GrammarError.

Three properties of llguidance shape the code around it. A matcher that is given an invalid token stays in an error
state, so each token is validated before it is consumed. Copies of a matcher share one lexer; when one text drives the
lexer to a limit, all copies fail, and each then continues with a new lexer. Forced bytes are tokenized with
`Vocabulary.encode`, which must be the model's own tokenizer, or the masks are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import llguidance

from plait.constrained.specs import GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary

# -- the tokenizer ---------------------------------------------------------------------------------
# llguidance's form of a vocabulary, built once for each vocabulary.

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [  # tokens that a state of the lexer admits or not as a whole: a mask then visits only the others
    r"[\x20\x0A\x0D\x09]+",
    *(_IN_STRING + count for count in ("{1,10}", "{1,30}", "+")),  # these four are llguidance's own
    *(_IN_STRING + count for count in ("{1,2}", "{1,4}", "{1,7}")),  # strings near their maxLength
    # Names and identifiers under a pattern. Of a character and a repeat llguidance looks for a repeat at the head of
    # each alternative of the state; of a repeat alone it does so only where the state has one alternative.
    *("[A-Za-z][A-Za-z]" + count for count in ("{0,2}", "{0,5}", "{0,11}")),
]


class _TokenizerAdapter:
    """The vocabulary with the interface that LLTokenizer expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [i for i, token in enumerate(vocabulary.token_bytes) if not token]
        # Tokens without a text need one each, or a mask that has one of them has all.
        self.tokens = [token or b"<%d>" % i for i, token in enumerate(vocabulary.token_bytes)]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)


_tokenizers: WeakKeyDictionary[Vocabulary, llguidance.LLTokenizer] = WeakKeyDictionary()


def tokenizer_of(vocabulary: Vocabulary, masks_quickly: bool = True) -> llguidance.LLTokenizer:
    """Returns llguidance's tokenizer of the vocabulary, built once; about 0.2 s for 49,152 tokens.

    Half of that is for the tables (slices) with which it masks the tokens of strings quickly.
    """
    tokenizer = _tokenizers.get(vocabulary)
    if tokenizer is None:
        adapter = _TokenizerAdapter(vocabulary)
        slices = _SLICES if masks_quickly else list[str]()
        tokenizer = llguidance.LLTokenizer(
            adapter, n_vocab=len(vocabulary), eos_token=list(vocabulary.eos_ids), slices=slices
        )
        _tokenizers[vocabulary] = tokenizer
    return tokenizer


def warm_up(vocabulary: Vocabulary, *, masks_quickly: bool = True) -> None:
    """Builds what the first grammar for `vocabulary` would otherwise wait for; nothing if it names no end token.

    Without `masks_quickly`, in a process that only checks grammars, it takes half as long.
    """
    if vocabulary.eos_ids:
        tokenizer_of(vocabulary, masks_quickly)


def is_warm(vocabulary: Vocabulary) -> bool:
    """Returns whether `warm_up` has been called for `vocabulary`."""
    return vocabulary in _tokenizers


# -- matchers --------------------------------------------------------------------------------------

MAX_REASON = 200  # characters of an error text
MAX_ITEMS = 20_000  # of the parser in one step
LEXER_ERROR = "lexer error"  # how llguidance's errors begin that concern all copies of a matcher
DEAD_END = "the constraint cannot be met from here on"
EMPTY_LANGUAGE = "no text of this constraint can be written in tokens of the vocabulary"


def compile_inner_matcher(
    text: str, vocabulary: Vocabulary, max_items: int = MAX_ITEMS, max_items_in_row: int = MAX_ITEMS
) -> llguidance.LLMatcher:
    """Returns llguidance's matcher for a grammar in its notation, at the start of a text. Raises GrammarError.

    >>> compile_inner_matcher(LLMatcher.grammar_from_regex("[0-9]+"), vocabulary)            # doctest: +SKIP
    """
    limits = _limits(max_items, max_items_in_row)
    return raise_on_error(llguidance.LLMatcher(tokenizer_of(vocabulary), text, log_level=0, limits=limits))


def grammar_refusal(text: str) -> str:
    """Returns why llguidance refuses a grammar in its notation, whatever the vocabulary; "" if it does not."""
    error = llguidance.LLMatcher.validate_grammar(text, limits=_limits())
    return _first_line(error) if error else ""


def _limits(max_items: int = MAX_ITEMS, max_items_in_row: int = MAX_ITEMS) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=5_000_000,  # 50,000 listed values take half of it, 0.1 s
        step_lexer_fuel=400_000,  # at most 30 ms in one step
        step_max_items=max_items,
        max_items_in_row=max_items_in_row,  # the bound on a step holds for each row of it
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def raise_on_error(inner: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """Returns `inner`, or raises GrammarError with the first line of its error."""
    if inner.is_error():
        raise GrammarError(_first_line(inner.get_error()))
    return inner


def _first_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip() and line != "<non-verbose/>"]
    reason = lines[0] if lines else "llguidance gave up"
    return EMPTY_LANGUAGE if reason.startswith("NoExtension") else reason[:MAX_REASON]
