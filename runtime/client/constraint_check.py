"""Checks constraints without a model: whether one compiles, and whether a finished text matches it.

Both checks run over a vocabulary of the 256 single bytes.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NoReturn

import msgspec

from plait.constrained.cfg.gbnf_tokens import without_tokens
from plait.constrained.compile_service.blocking import compile_grammar
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.reasoning_matcher import ReasoningGrammar
from plait.constrained.specs import (
    Ebnf,
    Elements,
    GrammarError,
    JsonObject,
    JsonSchema,
    Keywords,
    Reasoning,
    Spec,
    Structural,
)
from plait.constrained.tokens.vocabulary import Vocabulary

COMPILE_TIMEOUT_S = 60.0


def constraint_error(spec: Spec) -> str | None:
    """Returns why no runtime can compile `spec`, or None if a runtime can.

    The compilation runs in a child process. Its time limit is far above a runtime's own, so that a busy machine does
    not make a valid constraint look invalid. A model's vocabulary is larger and may still exceed a size limit.

    >>> constraint_error(Lark("start: missing"))                            # doctest: +SKIP
    'no rule or terminal is named missing (at 7)'
    """
    try:
        compile_grammar(_without_control_tokens(spec), _byte_vocabulary(), COMPILE_TIMEOUT_S)
    except GrammarError as error:
        return str(error)
    return None


def constraint_mismatch(spec: Spec, text: str, *, require_complete: bool = True) -> str | None:
    """Returns in one line why `text` does not match `spec`, or None if it does.

    With `require_complete=False` every prefix of a matching text matches. Raises GrammarError if `spec` does not
    compile.

    >>> constraint_mismatch(Choices(("yes", "no")), "ye")                        # doctest: +SKIP
    "'ye' breaks off where 's' must follow"
    """
    matcher = _grammar(spec).matcher()
    data = text.encode()
    for offset, byte in enumerate(data):
        try:
            is_accepted = matcher.accept(byte)
        except GrammarError as error:
            return f"following it costs too much: {error.reason}"
        if not is_accepted:
            before, rest = data[:offset].decode(errors="ignore"), data[offset:].decode(errors="replace")
            if not offset:
                return f"it cannot begin with {rest[:20]!r}"
            return f"{rest[:20]!r} does not fit behind {before[-20:]!r}"
    if not require_complete:
        return None
    if not matcher.is_accepting:
        forced = matcher.forced_bytes().decode(errors="ignore")
        missing = f" where {forced[:20]!r} must follow" if forced else " before it is complete"
        return f"{text[-40:]!r} breaks off{missing}"
    return _grammar(spec).check(text)


@lru_cache(maxsize=256)
def _grammar(spec: Spec) -> Grammar:
    """Compiles `spec` for matching, in this process and without a time limit.

    Patterns are matched step by step instead of as a complete automaton, which can take minutes and gigabytes, while
    one text visits few of its states. Limits that only sampled text must obey, such as the length of numbers and the
    placement of white space, are relaxed to what JSON allows.
    """
    if isinstance(spec, Reasoning):
        plain = msgspec.structs.replace(spec, control_tokens=())  # the text has the texts of control tokens
        return ReasoningGrammar(plain, _grammar(spec.then), _byte_vocabulary())
    source = compile_spec(_relaxed(spec), _byte_vocabulary(), _refuse_automaton)
    if isinstance(source, LlguidanceSource):
        source = msgspec.structs.replace(source, max_digits=0)
    return build_grammar(source, _byte_vocabulary())


def _relaxed(spec: Spec) -> Spec:
    """Returns `spec` with white space wherever JSON allows it, and without control tokens."""
    if isinstance(spec, Ebnf):
        return _without_control_tokens(spec)
    if isinstance(spec, JsonSchema | JsonObject | Elements | Keywords | Structural):
        spec = msgspec.structs.replace(spec, whitespace=True, compact=False)
    if isinstance(spec, Structural):
        triggers = [
            call if isinstance(call.content, str) else msgspec.structs.replace(call, content=_relaxed(call.content))  # type: ignore[arg-type]
            for call in spec.calls
        ]
        otherwise = None if spec.otherwise is None else _relaxed(spec.otherwise)
        spec = msgspec.structs.replace(_without_control_tokens(spec), triggers=triggers, otherwise=otherwise)
    return spec


def _without_control_tokens(spec: Spec) -> Spec:
    """Returns `spec` with the texts of its control tokens as text, and those of GBNF as any text: single bytes are no
    control tokens."""
    if isinstance(spec, Ebnf):
        return Ebnf(without_tokens(spec.grammar))
    if isinstance(spec, Reasoning):
        return msgspec.structs.replace(spec, then=_without_control_tokens(spec.then), control_tokens=())
    return msgspec.structs.replace(spec, control_tokens=(), free_tokens=()) if isinstance(spec, Structural) else spec


def _refuse_automaton(pattern: str) -> NoReturn:
    raise DfaTooLarge


@cache
def _byte_vocabulary() -> Vocabulary:
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    return Vocabulary(tokens, eos_ids=(256,), encode=lambda text: list(text.encode()))
