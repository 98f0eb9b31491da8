"""Constraints on generated text: regular expressions, JSON schemas and grammars, compiled to masks over a vocabulary's
tokens.

Names are imported when they are first used, so that `plait.constrained.specs` loads neither numpy nor a grammar
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.constrained.captures import capture_names, captured_texts
    from plait.constrained.compile_service.blocking import compile_grammar
    from plait.constrained.compile_service.pool import CompilePool
    from plait.constrained.grammar import Grammar, Matcher, mask_words
    from plait.constrained.specs import (
        Choices,
        CompileQueueFull,
        Ebnf,
        Elements,
        GrammarError,
        JsonObject,
        JsonSchema,
        Keywords,
        Lark,
        Notation,
        Reasoning,
        Regex,
        Spec,
        Structural,
        Trigger,
    )
    from plait.constrained.tokens.vocabulary import Vocabulary
    from plait.constrained.transformers_processor import GrammarLogitsProcessor

__all__ = [
    "Choices",
    "CompilePool",
    "CompileQueueFull",
    "Ebnf",
    "Elements",
    "Grammar",
    "GrammarError",
    "GrammarLogitsProcessor",
    "JsonObject",
    "JsonSchema",
    "Keywords",
    "Notation",
    "Lark",
    "Matcher",
    "Reasoning",
    "Regex",
    "Spec",
    "Structural",
    "Trigger",
    "Vocabulary",
    "capture_names",
    "captured_texts",
    "compile_grammar",
    "mask_words",
]
_MODULE_OF = {
    "CompilePool": "compile_service.pool",
    "Grammar": "grammar",
    "GrammarLogitsProcessor": "transformers_processor",
    "Matcher": "grammar",
    "Vocabulary": "tokens.vocabulary",
    "capture_names": "captures",
    "captured_texts": "captures",
    "compile_grammar": "compile_service.blocking",
    "mask_words": "grammar",
}  # the others are in specs


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"plait.constrained.{_MODULE_OF.get(name, 'specs')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
