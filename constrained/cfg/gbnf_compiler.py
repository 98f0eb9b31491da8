"""Compiles Ebnf: GBNF without recursion becomes one pattern, with recursion a grammar over lexemes.

Recursion at the beginning and end of rules becomes loops (gbnf_recursion.py). What is still recursive is divided into
lexemes as large as llguidance's lexer can take (gbnf_lexemes.py), and tried on long texts (gbnf_trial.py).
"""

from __future__ import annotations

import llguidance

from plait.constrained.cfg.gbnf_lexemes import LexemeGrammar
from plait.constrained.cfg.gbnf_parser import TokenSet, parse_gbnf
from plait.constrained.cfg.gbnf_patterns import PatternWriter
from plait.constrained.cfg.gbnf_recursion import NEVER, productive, reachable, regular_rules, without_end_recursion
from plait.constrained.cfg.gbnf_tokens import with_token_rules
from plait.constrained.cfg.gbnf_trial import check_long_texts
from plait.constrained.cfg.lark_depth import check_depth
from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.regex.regex_compiler import ByteDfaBuilder, compile_plain_pattern
from plait.constrained.specs import Ebnf, GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary


def compile_ebnf(
    spec: Ebnf, vocabulary: Vocabulary, build_byte_dfa: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Compiles a grammar, to an automaton if its texts are those of a pattern. Raises GrammarError with the index of an
    error, and for a grammar whose texts could be divided in more ways the longer they are.

    `build_byte_dfa` builds the automaton over bytes; see compile_plain_pattern.

    >>> compile_ebnf(Ebnf('root ::= "a"+'), vocabulary)                   # doctest: +SKIP
    """
    rules = reachable(with_token_rules(parse_gbnf(spec.grammar), vocabulary))
    if "root" not in regular_rules(rules):
        rules = reachable(without_end_recursion(reachable(productive(rules))))
    if rules["root"] == NEVER:
        raise GrammarError("the rule root matches no text: each alternative leads back to itself")
    if "root" in regular_rules(rules):
        return compile_plain_pattern(PatternWriter(rules).plain(rules["root"]), vocabulary, build_byte_dfa)
    lark = LexemeGrammar(rules, vocabulary).to_lark()
    try:
        check_depth(lark)
    except GrammarError as error:
        raise GrammarError(error.reason) from None  # its index is not one in the grammar that was given
    named = {token for node in rules.values() if isinstance(node, TokenSet) and not node.negated for token in node.ids}
    pairs = tuple((f"<[{token}]>", token) for token in sorted(named))
    source = LlguidanceSource(llguidance.LLMatcher.grammar_from_lark(lark), control_tokens=pairs)
    check_long_texts(rules, source.text, vocabulary)
    return ensure_compiles(source, vocabulary)
