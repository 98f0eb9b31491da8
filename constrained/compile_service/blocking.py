"""`compile_grammar`: compiles one constraint and waits, for tools, tests and programs without an event loop."""

from __future__ import annotations

import atexit
import os
import select
import threading
from time import monotonic

from plait.constrained.compile_service.pool import CompilePool
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.grammar import Grammar
from plait.constrained.specs import Choices, GrammarError, Spec
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_POOLS = 2
DEADLINE_S = 2.0
_pools: list[CompilePool] = []  # the most recently used last
_lock = threading.Lock()


def compile_grammar(spec: Spec, vocabulary: Vocabulary, deadline_s: float = DEADLINE_S) -> Grammar:
    """Returns the grammar of `spec`. Raises GrammarError if it is unsupported, too slow (`deadline_s`) or too large.

    An argument of another type raises TypeError.

    Choices compile in this process, every other form in a child process, which is kept for later calls (for the last
    two vocabularies) and ends with this process. The call blocks; a scheduler uses CompilePool instead.

    >>> compile_grammar(Choices(("yes", "no")), vocabulary).matcher()     # doctest: +SKIP
    """
    if not isinstance(spec, Spec.__args__):
        raise TypeError(f"a constraint is a Regex, a JsonSchema or one of the other specs, not {type(spec).__name__}")
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(f"a vocabulary comes from Vocabulary.from_tokenizer, not {type(vocabulary).__name__}")
    if isinstance(spec, Choices):
        return build_grammar(compile_spec(spec, vocabulary), vocabulary)
    with _lock:
        return _wait_for(_pool_for(vocabulary, deadline_s), spec)


def _pool_for(vocabulary: Vocabulary, deadline_s: float) -> CompilePool:
    matching = (pool for pool in _pools if pool.vocabulary is vocabulary and pool.deadline_s == deadline_s)
    pool = next(matching, None)
    if pool is None:
        while len(_pools) >= MAX_POOLS:
            _pools.pop(0).close()
        pool = CompilePool(vocabulary, deadline_s=deadline_s)
        pool.start()
    else:
        _pools.remove(pool)
    _pools.append(pool)
    return pool


def _wait_for(pool: CompilePool, spec: Spec) -> Grammar:
    ticket = pool.submit(spec)
    while True:
        for done, answer in pool.collect():
            if done == ticket:
                if isinstance(answer, GrammarError):
                    raise answer
                return answer
        poller = select.poll()
        for fileno in pool.filenos():
            poller.register(fileno, select.POLLIN)
        until = pool.next_deadline()
        poller.poll(None if until is None else max(0.0, (until - monotonic()) * 1000 + 1))


def _close_pools() -> None:
    while _pools:
        _pools.pop().close()


atexit.register(_close_pools)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the child processes belong to the process that started them
