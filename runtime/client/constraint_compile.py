"""Whether a constraint can be used at all, asked before any model is there.

Knows: how constraints are compiled. Must not know: models, sessions, who asks.
"""

from __future__ import annotations

from functools import cache

from plait.constrained.compile_service.blocking import compile_grammar
from plait.constrained.specs import GrammarError, Spec
from plait.constrained.vocabulary import Vocabulary

COMPILE_TIMEOUT_S = 60.0


def constraint_error(spec: Spec) -> str | None:
    """Why no runtime can hold a text to `spec`; None where one can. Compiles it over single bytes, in a child process
    with a deadline far above a runtime's own, so that no busy machine makes a sound constraint look wrong. A model's
    vocabulary is larger and may meet a limit of size that bytes do not.

    >>> constraint_error(Lark("start: missing"))                            # doctest: +SKIP
    'unknown name: "missing" (at 7)'
    """
    try:
        compile_grammar(spec, _bytes(), COMPILE_TIMEOUT_S)
    except GrammarError as error:
        return str(error)
    return None


@cache
def _bytes() -> Vocabulary:
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    return Vocabulary(tokens, eos_ids=(256,), encode=lambda text: list(text.encode()))
