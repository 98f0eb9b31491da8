"""Chooses the compiler for each form of constraint, and builds a Grammar from its result, in the calling process."""

from __future__ import annotations

from plait.constrained.cfg.gbnf_compiler import compile_ebnf
from plait.constrained.cfg.lark_compiler import compile_lark
from plait.constrained.dfa.choices import compile_choices
from plait.constrained.dfa.dfa_grammar import DfaGrammar
from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, LlguidanceSource
from plait.constrained.json_schema.schema_compiler import compile_json
from plait.constrained.regex.regex_compiler import ByteDfaBuilder, compile_regex
from plait.constrained.specs import Choices, Ebnf, GrammarError, Lark, Reasoning, Regex, Spec, Structural
from plait.constrained.structural.structural_compiler import compile_structural
from plait.constrained.tokens.vocabulary import Vocabulary


def compile_spec(
    spec: Spec, vocabulary: Vocabulary, build_byte_dfa: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Compiles `spec` to what a Grammar is built from. Raises GrammarError if the constraint cannot be used.

    `build_byte_dfa` replaces the function of that name in regex/compiler.py, for instance by one with a time limit.

    >>> compile_spec(Choices(("yes", "no")), vocabulary)                  # doctest: +SKIP
    """
    if not vocabulary.eos_ids:
        raise GrammarError("the vocabulary names no end token")
    if isinstance(spec, Reasoning):
        raise GrammarError("reasoning is compiled as the constraint on its value; wrap that in a ReasoningGrammar")
    if isinstance(spec, Choices):
        return compile_choices(spec, vocabulary)
    if isinstance(spec, Regex):
        return compile_regex(spec, vocabulary, build_byte_dfa)
    if isinstance(spec, Lark):
        return compile_lark(spec, vocabulary)
    if isinstance(spec, Ebnf):
        return compile_ebnf(spec, vocabulary, build_byte_dfa)
    if isinstance(spec, Structural):
        return compile_structural(spec, vocabulary)
    return compile_json(spec, vocabulary)


def build_grammar(compiled: TokenDfa | LlguidanceSource, vocabulary: Vocabulary) -> Grammar:
    """Builds the Grammar of a compiled constraint: microseconds for a TokenDfa, milliseconds for an LlguidanceSource.

    >>> build_grammar(compile_spec(spec, vocabulary), vocabulary)            # doctest: +SKIP
    """
    if isinstance(compiled, LlguidanceSource):
        return LlguidanceGrammar(compiled, vocabulary)
    return DfaGrammar(compiled, vocabulary)
