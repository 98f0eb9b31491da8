"""Which compiler serves which form of constraint, and how what it makes becomes a Grammar.

Knows: every form. Must not know: processes or caches. Runs in whichever process calls it.
"""

from __future__ import annotations

from plait.constrained.choices import compile_choices
from plait.constrained.dfa import DfaGrammar
from plait.constrained.ebnf import compile_ebnf
from plait.constrained.grammar import Grammar
from plait.constrained.json_schema import compile_json, compile_structural
from plait.constrained.lark import compile_lark
from plait.constrained.llg import LlgGrammar, LlgText
from plait.constrained.product import Table
from plait.constrained.regex import StatesOf, compile_regex
from plait.constrained.specs import Choices, Ebnf, GrammarError, Lark, Regex, Spec, Structural
from plait.constrained.vocabulary import Vocabulary


def compile_form(spec: Spec, vocabulary: Vocabulary, states: StatesOf | None = None) -> Table | LlgText:
    """What a Grammar is made from. GrammarError where the constraint cannot be used.

    `states` makes a pattern's automaton over bytes, where it is to be made with bounds; see regex.py.

    >>> compile_form(Choices(("yes", "no")), vocabulary)                  # doctest: +SKIP
    """
    if not vocabulary.eos_ids:
        raise GrammarError("the vocabulary names no end token")
    if isinstance(spec, Choices):
        return compile_choices(spec, vocabulary)
    if isinstance(spec, Regex):
        return compile_regex(spec, vocabulary, states)
    if isinstance(spec, Lark):
        return compile_lark(spec, vocabulary)
    if isinstance(spec, Ebnf):
        return compile_ebnf(spec, vocabulary, states)
    if isinstance(spec, Structural):
        return compile_structural(spec, vocabulary)
    return compile_json(spec, vocabulary)


def as_grammar(form: Table | LlgText, vocabulary: Vocabulary) -> Grammar:
    """The Grammar of a compiled form: microseconds for a Table, milliseconds for an LlgText.

    >>> as_grammar(compile_form(spec, vocabulary), vocabulary)            # doctest: +SKIP
    """
    if isinstance(form, LlgText):
        return LlgGrammar(form, vocabulary)
    return DfaGrammar(form, vocabulary)
