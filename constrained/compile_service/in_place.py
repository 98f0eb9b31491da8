"""Compiles what is certainly small in the calling process, so that it waits for no worker: names, dates, few choices,
plain objects.

All work has a fixed bound, a few milliseconds; what exceeds it is left to a worker, which gives the same automaton.
"""

from __future__ import annotations

import re
from time import monotonic, thread_time

from plait.constrained.compiler import build_grammar
from plait.constrained.dfa.choices import compile_choices
from plait.constrained.dfa.token_dfa import DfaTooLarge, TokenDfa, WalkLimits, build_table_dfa
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.inner_matcher import is_warm
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.json_schema.schema_compiler import compile_json
from plait.constrained.json_schema.small_schema import is_small_schema
from plait.constrained.regex.char_classes import are_classes_warm
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.regex.small_dfa import build_small_dfa
from plait.constrained.specs import Choices, GrammarError, JsonObject, JsonSchema, Regex, Spec
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_SHARE = 0.05  # of the caller's time for compiling in place; workers compile the rest
MAX_CHOICES_BYTES = 512
MAX_PATTERN_CHARS = 256
MAX_WORK = 2000
MAX_BYTE_STATES = 256
LIMITS = WalkLimits(edges=30_000, pairs=60_000)
_COSTLY_SYNTAX = re.compile(r"\\[wW]|\(\?[^:]|\{\d{3,}")  # `\w` has hundreds of ranges of characters
_NAMED_CLASS = re.compile(r"\\[dDsS]")  # up to 64 ranges; 0.3 ms each to write and to read again
MAX_NAMED_CLASSES = 8
MAX_PLAIN_CHARS = 4000  # of the pattern with its classes written as ranges


class InPlaceCompiler:
    """Compiles small specs for one vocabulary in the calling thread, for at most a twentieth of its time.

    >>> InPlaceCompiler(vocabulary).compile(Choices(("yes", "no")))       # doctest: +SKIP
    (<DfaGrammar>, 0.0004)
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.not_before = 0.0  # nothing is compiled before this time (monotonic seconds)

    def compile(self, spec: Spec) -> tuple[Grammar | None, float]:
        """Returns the grammar of a small spec, if it may be compiled now, and the CPU seconds that were spent."""
        if monotonic() < self.not_before:
            return None, 0.0
        start = thread_time()
        compiled = compile_in_place(spec, self._vocabulary)
        grammar = None if compiled is None else build_grammar(compiled, self._vocabulary)
        spent_s = thread_time() - start
        self.not_before = monotonic() + spent_s / MAX_SHARE
        if grammar is not None:
            self._vocabulary.warm_up_forced_tokens()  # here: the time of a token counts against its constraint
        return grammar, spent_s


def compile_in_place(spec: Spec, vocabulary: Vocabulary) -> TokenDfa | LlguidanceSource | None:
    """Returns a small spec compiled; None for any other one, and for one that is refused.

    Schemas are compiled only once llguidance's tokenizer of the vocabulary is built, which takes longer than they do.

    >>> compile_in_place(Choices(("yes", "no")), vocabulary)              # doctest: +SKIP
    """
    try:
        if not vocabulary.eos_ids:
            return None
        if isinstance(spec, Choices):
            is_small = sum(map(len, spec.choices)) <= MAX_CHOICES_BYTES
            return compile_choices(spec, vocabulary) if is_small else None
        if isinstance(spec, Regex):
            return _compile_regex(spec.pattern, vocabulary)
        if isinstance(spec, JsonSchema | JsonObject):
            return compile_json(spec, vocabulary) if is_warm(vocabulary) and is_small_schema(spec) else None
    except (GrammarError, DfaTooLarge, ValueError):
        pass  # a worker says why
    return None


def _compile_regex(pattern: str, vocabulary: Vocabulary) -> TokenDfa | None:
    if len(pattern) > MAX_PATTERN_CHARS or _COSTLY_SYNTAX.search(pattern):
        return None
    num_named = len(_NAMED_CLASS.findall(pattern))
    if num_named > (MAX_NAMED_CLASSES if are_classes_warm() else 0):  # computing them takes longer than the rest
        return None
    plain = to_plain_pattern(pattern).pattern
    if len(plain) > MAX_PLAIN_CHARS:
        return None
    transitions, start, accepting = build_small_dfa(plain, MAX_WORK)
    if len(transitions) > MAX_BYTE_STATES:
        return None
    return build_table_dfa(transitions, start, accepting, vocabulary, LIMITS)
