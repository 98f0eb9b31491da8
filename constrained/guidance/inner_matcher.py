"""Makes llguidance's matchers, within the limits that plait sets, and turns their errors into GrammarError.

Three properties of llguidance shape the code around it. A matcher that is given an invalid token stays in an error
state, so each token is validated before it is consumed. Copies of a matcher share one lexer; when one text drives the
lexer to a limit, all copies fail, and each then continues with a new lexer. Forced bytes are tokenized with
`Vocabulary.encode`, which must be the model's own tokenizer, or the masks are wrong.
"""

from __future__ import annotations

import llguidance

from plait.constrained.guidance.llguidance_tokenizer import tokenizer_of
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary

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
