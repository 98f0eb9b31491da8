"""Specs that would cost much: how long until each is answered, how long the caller is held up, and the memory."""

from __future__ import annotations

import os
import select
from pathlib import Path
from time import monotonic, perf_counter

from expensive_specs import EXPENSIVE_SPECS

from plait.constrained import CompilePool, Grammar, GrammarError, Regex, Spec, Vocabulary

_held_up: list[float] = []  # seconds that each call of submit or collect took


def main(vocabulary: Vocabulary) -> None:
    pool = CompilePool(vocabulary)
    pool.start()
    try:
        answer(pool, Regex("warm"))
        print(f"memory before the bombs: {_memory(pool)}")
        for name, make in EXPENSIVE_SPECS.items():
            _held_up.clear()
            begun = perf_counter()
            try:
                found = answer(pool, make())
            except GrammarError as error:
                found = error
            spent, longest = 1e3 * (perf_counter() - begun), 1e3 * max(_held_up, default=0.0)
            outcome = f"refused: {found.reason[:60]}" if isinstance(found, GrammarError) else "compiled"
            print(f"  {name:18} {spent:7.1f} ms, the caller held up {longest:5.2f} ms at most; {outcome}")
        answer(pool, Regex("last"))
        print(f"memory after the bombs: {_memory(pool)}")
    finally:
        pool.close()


def answer(pool: CompilePool, spec: Spec) -> Grammar | GrammarError:
    """What the pool says, waited for as a scheduler would."""
    begun = perf_counter()
    ticket = pool.submit(spec)
    _held_up.append(perf_counter() - begun)
    while True:
        begun = perf_counter()
        done = dict(pool.collect())
        _held_up.append(perf_counter() - begun)
        if ticket in done:
            return done[ticket]
        poller = select.poll()
        for fileno in pool.filenos():
            poller.register(fileno, select.POLLIN)
        until = pool.next_deadline()
        poller.poll(None if until is None else max(0.0, (until - monotonic()) * 1000 + 1))


def _memory(pool: CompilePool) -> str:
    children = [f"{child.resident_bytes() >> 20}" for child in pool._workers]
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return f"this process {own >> 20} MiB, children {', '.join(children)} MiB"
