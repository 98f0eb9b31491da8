"""Token terminals of GBNF: `<[10]>`, `<|name|>` and `!<[10]>` stand for one token, whatever text it has.

llguidance takes a token that a grammar names, if it is allowed, and follows no text beside it. So a grammar is refused
if at one place a token may stand and a text that may begin with the token's bytes (gbnf_lexemes.py finds these).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from plait.constrained.cfg.gbnf_parser import (
    TOKEN,
    Alternatives,
    CharClass,
    Node,
    Repeat,
    RuleReference,
    Sequence,
    TokenSet,
    TokenTerminal,
)
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary

_ANY_CHARACTER = CharClass((), negated=True)
_IN_TEXT = re.compile("\ufffe([0-9]+);")  # a token in a text that the trial writes; no text has U+FFFE
_OTHERS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|(?P<token>' + TOKEN.pattern + ")")


def with_token_rules(rules: dict[str, Node], vocabulary: Vocabulary) -> dict[str, Node]:
    """Returns rules in which a reference to a rule of its own, a TokenSet, takes the place of each token terminal.

    No other control token stands in a text, so `!<x>` of a control token that is repeated is any text. Raises
    GrammarError with the index of a terminal that the vocabulary does not have as one token.

    >>> with_token_rules(parse_gbnf("root ::= <[10]>"), vocabulary)       # doctest: +SKIP
    """
    added: dict[str, Node] = {}

    def written(node: Node) -> Node:
        match node:
            case TokenTerminal():
                tokens = _resolved(node, vocabulary)
                added[tokens.lark] = tokens
                return RuleReference(tokens.lark, node.where)
            case Repeat(TokenTerminal(_, True) as one, low, None) if low < 2:
                if not vocabulary.token_bytes[_id_of(one, vocabulary)]:
                    return Repeat(_ANY_CHARACTER, low, None)
                return replace(node, part=written(one))
            case Repeat():
                return replace(node, part=written(node.part))
            case Sequence():
                return Sequence(tuple(map(written, node.parts)))
            case Alternatives():
                return Alternatives(tuple(map(written, node.alternatives)))
        return node

    return {name: written(node) for name, node in rules.items()} | added


def _id_of(terminal: TokenTerminal, vocabulary: Vocabulary) -> int:
    token = terminal.token
    if isinstance(token, str):
        found = vocabulary.token_of(token)
        if found is None:
            raise GrammarError(f"{token[:80]} is not one token of the vocabulary", terminal.where)
        token = found
    if token >= len(vocabulary):
        raise GrammarError(f"the vocabulary has no token {token}", terminal.where)
    if token in vocabulary.eos_ids:
        raise GrammarError(f"the token {terminal.token} ends a text and cannot stand in one", terminal.where)
    return token


def _resolved(terminal: TokenTerminal, vocabulary: Vocabulary) -> TokenSet:
    token = _id_of(terminal, vocabulary)
    if not terminal.negated:
        return TokenSet(frozenset({token}))
    control = (number for number, data in enumerate(vocabulary.token_bytes) if not data)
    return TokenSet(frozenset({token, *control, *vocabulary.eos_ids}), negated=True)


def text_of_set(tokens: TokenSet, vocabulary: Vocabulary) -> str:
    """Returns one token of a set as it stands in a text for `encode_with_tokens`."""
    if not tokens.negated:
        return f"\ufffe{next(iter(tokens.ids))};"
    token = next((i for i in vocabulary.ids_by_bytes.values() if i not in tokens.ids), None)
    return "" if token is None else f"\ufffe{token};"


def encode_with_tokens(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the tokens of a text, in which some are written by `text_of_set`.

    >>> encode_with_tokens("a\\ufffe7;", lambda text: [ord(char) for char in text])
    [97, 7]
    """
    parts = _IN_TEXT.split(text)
    return [token for at, part in enumerate(parts) for token in ([int(part)] if at % 2 else encode(part))]


def without_tokens(grammar: str) -> str:
    """Returns a grammar with any text, or none, in place of each token terminal: a check without a vocabulary.

    >>> without_tokens('root ::= <[10]> "<[10]>"')
    'root ::= (.*) "<[10]>"'
    """
    return _OTHERS.sub(lambda match: "(.*)" if match["token"] else match[0], grammar)
