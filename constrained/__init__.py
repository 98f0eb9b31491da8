"""What the next token may be: constraints compiled for a vocabulary, as masks over its tokens.

Knows: bytes, tokens and grammars. Must not know: models, sampling, sessions or anything else of plait.
"""

from plait.constrained.compile_service.blocking import compile_grammar
from plait.constrained.compile_service.pool import CompilePool
from plait.constrained.grammar import Grammar, Matcher, mask_words
from plait.constrained.specs import Choices, Ebnf, GrammarError, JsonObject, JsonSchema, Lark, Regex, Spec, Structural
from plait.constrained.vocabulary import Vocabulary

__all__ = [
    "Choices",
    "CompilePool",
    "Ebnf",
    "Grammar",
    "GrammarError",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Matcher",
    "Regex",
    "Spec",
    "Structural",
    "Vocabulary",
    "compile_grammar",
    "mask_words",
]
