"""Whether a finished text is one that a constraint allows, by the very grammars that hold what a model samples.

Knows: constraints, and grammars over single bytes. Must not know: models, sessions, who wrote the text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn

import msgspec

from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Spec, Structural
from plait.constrained.vocabulary import Vocabulary

_END = 256
_BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (_END,), lambda text: list(text.encode()))


def constraint_mismatch(spec: Spec, text: str, *, require_complete: bool = True) -> str | None:
    """Why `text` is none of the texts of `spec`, in one line; None where it is. `whole=False`: it may break off
    where a longer text would fit. Raises GrammarError for a constraint that cannot be used.

    >>> constraint_mismatch(Choices(("yes", "no")), "ye")                        # doctest: +SKIP
    "'ye' breaks off where 's' must follow"
    """
    matcher = _grammar(spec).matcher()
    data = text.encode()
    for at, byte in enumerate(data):
        try:
            fits = matcher.accept(byte)
        except GrammarError as error:
            return f"following it costs too much: {error.reason}"
        if not fits:
            before, rest = data[:at].decode(errors="ignore"), data[at:].decode(errors="replace")
            return (
                f"{rest[:20]!r} does not fit behind {before[-20:]!r}" if at else f"it cannot begin with {rest[:20]!r}"
            )
    if require_complete and not matcher.is_accepting:
        forced = matcher.forced_bytes().decode(errors="ignore")
        must = f" where {forced[:20]!r} must follow" if forced else " before it is complete"
        return f"{text[-40:]!r} breaks off{must}"
    return _grammar(spec).check(text) if require_complete else None


@lru_cache(maxsize=256)
def _grammar(spec: Spec) -> Grammar:
    """Compiled here, not in a child with a deadline. A pattern's whole automaton can take minutes and gigabytes, and
    one text needs little of it: patterns are followed step by step. Numbers may be as long, and white space where,
    as JSON lets them be: that is fixed only for what a model samples."""
    if isinstance(spec, JsonSchema | JsonObject | Structural):
        spec = msgspec.structs.replace(spec, whitespace=True, compact=False)
    form = compile_spec(spec, _BYTES, _refuse_automaton)
    if isinstance(form, LlguidanceSource):
        form = msgspec.structs.replace(form, max_digits=0)
    return build_grammar(form, _BYTES)


def _refuse_automaton(pattern: str) -> NoReturn:
    raise DfaTooLarge
