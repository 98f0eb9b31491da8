"""The compile pool: results, deadlines, worker processes, memory limits and shutdown."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import current_thread, get_native_id
from time import monotonic, sleep

import psutil
import pytest
from compile_pools import PATIENCE_S, results_of
from expensive_specs import EXPENSIVE_SPECS
from waiting import is_running

from plait.constrained import (
    Choices,
    CompilePool,
    CompileQueueFull,
    Ebnf,
    Grammar,
    GrammarError,
    JsonSchema,
    Regex,
    Vocabulary,
    compile_grammar,
)
from plait.constrained.compile_service.grammar_builds import NICENESS, grammar_of
from plait.constrained.compile_service.worker_set import MAX_GROWTH_BYTES
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar

LONG_AUTOMATA = [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in (24, 25, 26)]
BOMB = JsonSchema({"oneOf": LONG_AUTOMATA})  # a check whether they exclude each other takes hours and gigabytes
MEMBERS = JsonSchema({"enum": [f"member {i}" for i in range(50_000)]})


def pids(pool: CompilePool) -> list[int]:
    return [child.pid for child in pool._workers]


@pytest.fixture(scope="module")
def pool(small: Vocabulary) -> Iterator[CompilePool]:
    """One for the tests that change none of its settings: its processes take half a second to start."""
    pool = CompilePool(small, deadline_s=PATIENCE_S)
    pool.start()
    yield pool
    pool.close()


def test_every_ticket_gets_its_result(pool: CompilePool) -> None:
    tickets = [pool.submit(spec) for spec in (Regex("a+"), Choices(("ab", "1")), Regex("(a"), Regex(r"\w{1,400}"))]
    answers = results_of(pool, tickets)
    number, choice, wrong, large = (answers[ticket] for ticket in tickets)
    assert isinstance(number, Grammar)
    assert number.matcher().forced_bytes() == b"a"
    assert isinstance(choice, Grammar)
    assert isinstance(wrong, GrammarError)
    assert (wrong.where, "subpattern" in wrong.reason) == (0, True)
    assert isinstance(large, LlguidanceGrammar)
    assert pool.collect() == []
    assert pool.next_deadline() is None


def test_identical_specs_compile_once_and_are_cached(pool: CompilePool) -> None:
    tickets = [pool.submit(Regex("[ab]+1")) for _ in range(5)]
    assert len(pool._queue) <= 1
    answers = results_of(pool, tickets)
    assert len({id(answer) for answer in answers.values()}) == 1
    again = pool.submit(Regex("[ab]+1"))
    assert pool.next_deadline() <= monotonic()
    assert pool.collect() == [(again, answers[tickets[0]])]


def test_a_job_ends_before_its_answer_is_due(small: Vocabulary) -> None:
    """The caller may be within a step of the model when the job's time is over, and its answer takes time too."""
    pool = CompilePool(small, deadline_s=1000)
    pool.start()
    try:
        ticket = pool.submit(BOMB)
        give_up = monotonic() + PATIENCE_S
        while not pool._workers.jobs and monotonic() < give_up:
            pool.collect()
            sleep(0.01)
        (job,) = pool._workers.jobs
        (worker,) = (worker for worker, running in pool._workers._jobs.items() if running is job)
        assert worker.deadline <= monotonic() + 901, "its processor time is looked at"
        assert job.answer_by <= monotonic() + 10_000, "on a busy machine"
        pool.cancel(ticket)
    finally:
        pool.close()


def test_a_long_spec_may_use_up_to_twice_the_processor_time(small: Vocabulary) -> None:
    pool = CompilePool(small, deadline_s=1000)
    pool.start()
    try:
        begun = list[tuple[float, float]]()
        pool._workers.begin = lambda job, spec, limit_s, max_limit_s: begun.append((limit_s, max_limit_s))
        for num_chars, limit_s in ((100, 900), (256 << 10, 1350), (900 << 10, 1800)):
            begun.clear()
            pool.submit(JsonSchema({"title": "a" * num_chars, "type": "integer"}, annotations=True))
            give_up = monotonic() + PATIENCE_S
            while not begun and monotonic() < give_up:
                pool.collect()
                sleep(0.01)
            assert begun[0] == (pytest.approx(limit_s, rel=1e-3), 10_000), num_chars
    finally:
        pool.close()


def test_an_expensive_spec_fails_at_its_deadline_and_others_compile(small: Vocabulary) -> None:
    pool = CompilePool(small, workers=2, deadline_s=2)
    pool.start()
    try:
        results_of(pool, [pool.submit(Regex("warm")), pool.submit(Regex("up"))])
        before = pids(pool)
        bomb = pool.submit(BOMB)
        others = [pool.submit(Regex(f"a{{{n}}}")) for n in range(1, 6)]
        answers = results_of(pool, others)
        assert all(isinstance(answers[ticket], Grammar) for ticket in others)
        answer = answers.get(bomb) or results_of(pool, [bomb])[bomb]
        assert isinstance(answer, GrammarError)
        assert answer.reason == "the JSON schema took too long: more than 1.8 s of processor time to compile"
        (killed,) = set(before) - set(pids(pool))
        give_up = monotonic() + PATIENCE_S
        while is_running(killed) and monotonic() < give_up:
            sleep(0.01)
        assert not is_running(killed)
        assert isinstance(results_of(pool, [last := pool.submit(Regex("b"))])[last], Grammar)
    finally:
        pool.close()


def test_a_stopped_worker_is_killed_after_the_deadline(small: Vocabulary) -> None:
    pool = CompilePool(small, deadline_s=0.2)
    pool.start()
    try:
        results_of(pool, [pool.submit(Regex("a"))])
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGSTOP)  # from here on only SIGKILL has any effect
        ticket = pool.submit(Regex("b"))
        assert isinstance(results_of(pool, [ticket])[ticket], GrammarError)
        give_up = monotonic() + PATIENCE_S
        while is_running(pid) and monotonic() < give_up:
            sleep(0.01)
        assert not is_running(pid)
    finally:
        pool.close()


def test_memory_is_limited_and_only_that_ticket_fails(small: Vocabulary) -> None:
    pool = CompilePool(small, deadline_s=PATIENCE_S, memory_bytes=20 << 20)
    pool.start()
    try:
        tickets = [pool.submit(spec) for spec in (Regex("a"), MEMBERS, Regex("b"), Regex(".*a.{25}"))]
        answers = results_of(pool, tickets)
        assert isinstance(answers[tickets[0]], Grammar)
        assert isinstance(answers[tickets[2]], Grammar)
        assert isinstance(answers[tickets[3]], LlguidanceGrammar), (
            "an automaton that is too large dies in a fork of its own"
        )
        failed = answers[tickets[1]]
        assert isinstance(failed, GrammarError)
        assert "memory" in failed.reason
    finally:
        pool.close()


def test_a_killed_worker_is_replaced(pool: CompilePool) -> None:
    results_of(pool, [pool.submit(Regex("a"))])
    (first,) = pids(pool)
    os.kill(first, signal.SIGKILL)
    ticket = pool.submit(Regex("b"))
    answer = results_of(pool, [ticket])[ticket]
    last = pool.submit(Regex("1"))
    assert isinstance(results_of(pool, [last])[last], Grammar)
    assert pids(pool) != [first]
    assert isinstance(answer, Grammar | GrammarError)  # either, because the job may be sent before the death is noticed


def test_the_cache_is_bounded_in_bytes(small: Vocabulary) -> None:
    pool = CompilePool(small, cache_bytes=100_000, deadline_s=PATIENCE_S)
    pool.start()
    try:
        results_of(pool, [pool.submit(Regex(f"a{{{n}}}")) for n in range(1, 60)])
        assert 1 < len(pool.cache.grammars) < 59
        assert pool.cache.grammars.nbytes <= 100_000
        assert pool.cache.get(Regex("a{59}")) is not None
        assert pool.cache.get(Regex("a{1}")) is None
        oldest = next(iter(pool.cache.grammars._entries))
        assert pool.cache.get(oldest) is not None
        results_of(pool, [pool.submit(Regex("b{59}"))])
        assert pool.cache.get(oldest) is not None, "a recently used entry must stay"
    finally:
        pool.close()


def test_errors_are_cached(small: Vocabulary) -> None:
    pool = CompilePool(small, deadline_s=0.3)
    pool.start()
    try:
        for spec in (Regex("(a"), BOMB):
            first: object = CompileQueueFull("")
            while isinstance(first, CompileQueueFull):  # a starved compiler's answer, which is not cached
                first = results_of(pool, [ticket := pool.submit(spec)])[ticket]
            pool.submit(spec)
            ((_, second),) = pool.collect()
            assert isinstance(first, GrammarError)
            assert isinstance(second, GrammarError)
            assert (first.reason, first.where) == (second.reason, second.where)
            assert first is not second, "every caller needs its own exception, which keeps its traceback"
        pool.cache._refusals.put(BOMB, replace(pool.cache._refusals.get(BOMB), until=monotonic()), 0)
        pool.submit(BOMB)
        assert pool.collect() == [], "a spec that exceeded the deadline is compiled again after a while"
        many = [pool.submit(Regex("(" + "a" * n)) for n in range(300)]
        results_of(pool, many)
        assert pool.cache._refusals.nbytes <= pool.cache._refusals.max_bytes
    finally:
        pool.close()


def test_patterns_without_an_automaton_are_matched_lazily(pool: CompilePool) -> None:
    specs = (Regex(".*a.{25}"), Regex(".{1,100}"), Ebnf("root ::= [^b]* [a] [^b]{25}"))
    results_of(pool, [pool.submit(Regex("warm"))])
    before, num_compiled = pids(pool), len(pool.compile_s)
    for spec in specs:
        grammar = results_of(pool, [ticket := pool.submit(spec)])[ticket]
        assert isinstance(grammar, Grammar)
    assert pids(pool) == before
    assert len(pool.compile_s) == num_compiled + 3
    assert max(pool.compile_s) < pool.deadline_s


def test_a_child_that_keeps_much_memory_is_replaced(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.constrained.compile_service.worker_set.MAX_GROWTH_BYTES", 24 << 20)
    pool = CompilePool(small)
    pool.start()
    try:
        results_of(pool, [pool.submit(Regex("a"))])
        (first,) = pids(pool)
        results_of(pool, [pool.submit(MEMBERS)])
        assert pids(pool) != [first]
        results_of(pool, [pool.submit(Regex("b"))])
        (second,) = pids(pool)
        assert psutil.Process(second).memory_info().rss < 150 << 20
        results_of(pool, [pool.submit(Regex("c"))])
        assert pids(pool) == [second]
    finally:
        pool.close()


def test_memory_is_bounded_after_expensive_specs(small: Vocabulary) -> None:
    """A worker may grow by MAX_GROWTH_BYTES (128 MiB) after its start, and this process by 64 MiB."""
    pool = CompilePool(small, deadline_s=0.5, cache_bytes=8 << 20)
    pool.start()
    try:
        results_of(pool, [pool.submit(Regex("warm"))])
        (child,) = pool._workers
        fresh, own = child.resident_bytes(), psutil.Process().memory_info().rss
        for name, make in EXPENSIVE_SPECS.items():
            with contextlib.suppress(GrammarError):
                results_of(pool, [pool.submit(make())])
            assert all(child.resident_bytes() <= fresh + MAX_GROWTH_BYTES + (8 << 20) for child in pool._workers), name
        assert psutil.Process().memory_info().rss <= own + (64 << 20)
    finally:
        pool.close()


def _niceness() -> int:
    """The niceness of the current thread, on Linux; elsewhere that of the process."""
    return os.getpriority(os.PRIO_PROCESS, get_native_id() if sys.platform == "linux" else 0)


def test_an_expensive_grammar_is_built_in_a_thread(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr("plait.constrained.compile_service.grammar_builds.QUICK_S", 0.0)
    monkeypatch.setattr(
        "plait.constrained.compile_service.grammar_builds.grammar_of",
        lambda *form: built.append((current_thread(), _niceness())) or grammar_of(*form),
    )
    pool = CompilePool(small)
    pool.start()
    try:
        spec = JsonSchema({"type": "object"})
        answers = results_of(pool, tickets := [pool.submit(spec), pool.submit(spec)])
        assert isinstance(answers[tickets[0]], LlguidanceGrammar)
        assert answers[tickets[0]] is answers[tickets[1]]
        thread, niceness = built[0]
        assert thread is not current_thread()
        assert niceness == (min(_niceness() + NICENESS, 19) if sys.platform == "linux" else _niceness())
        assert pool.cache.get(spec) is answers[tickets[0]]
        pool.submit(JsonSchema({"type": "array"}))
    finally:
        pool.close()
    assert [str(error) for _, error in pool.collect()] == ["the compiler was closed"]
    assert pool.filenos() == []


def test_a_cancelled_ticket_gets_no_result(pool: CompilePool) -> None:
    cancelled, active = pool.submit(Regex("a+")), pool.submit(Regex("a+"))
    only_ticket = pool.submit(Regex("never"))
    pool.cancel(cancelled)
    pool.cancel(only_ticket)
    assert set(results_of(pool, [active])) == {active}
    last = pool.submit(Regex("b"))
    assert set(results_of(pool, [last])) == {last}


def test_close_ends_workers_and_fails_waiting_tickets(small: Vocabulary) -> None:
    pool = CompilePool(small)
    with pytest.raises(RuntimeError):
        pool.submit(Regex("a"))
    pool.start()
    results_of(pool, [pool.submit(Regex("b"))])
    (pid,) = pids(pool)
    ticket = pool.submit(Regex("a"))
    pool.close()
    assert not is_running(pid)
    assert not psutil.pid_exists(pid), "it is reaped"
    assert pool.filenos() == []
    ((answered, error),) = pool.collect()
    assert answered == ticket
    assert isinstance(error, GrammarError)


def test_a_worker_that_cannot_start_fails_its_tickets(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = CompilePool(small)
    pool.start()
    try:
        for pattern in ("a", "b"):
            ticket = pool.submit(Regex(pattern))
            answer = results_of(pool, [ticket])[ticket]
            assert isinstance(answer, GrammarError)
            assert "start" in answer.reason
        sleep(0.05)
        pool.collect()
        assert len(pool._workers) <= 1
    finally:
        pool.close()


def test_without_start_eagerly_the_first_job_starts_a_worker(small: Vocabulary) -> None:
    pool = CompilePool(small, start_eagerly=False, deadline_s=PATIENCE_S)
    pool.start()
    try:
        pool.collect()
        assert not pool._workers
        for pattern in ("a+", "b+"):  # the second job uses the same worker
            ticket = pool.submit(Regex(pattern))
            assert not isinstance(results_of(pool, [ticket])[ticket], GrammarError)
            assert len(pool._workers) == 1
    finally:
        pool.close()


PARENT = """
import os, sys
from plait.constrained import CompilePool, Regex, Vocabulary
pool = CompilePool(Vocabulary((b"", b"a"), (0,), lambda text: []))
pool.start()
pool.submit(Regex("a"))
while not (answers := pool.collect()):
    pass
assert pool.cache.get(Regex('a')), answers
print(next(iter(pool._workers)).pid, flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_children_end_with_their_parent() -> None:
    command = [sys.executable, "-P", "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    give_up = monotonic() + PATIENCE_S
    while is_running(pid) and monotonic() < give_up:
        sleep(0.02)
    assert not is_running(pid)


def test_compile_grammar_returns_the_grammar_or_raises(smollm: Vocabulary) -> None:
    matcher = compile_grammar(Regex(r"[0-9]+(\.[0-9]+)?"), smollm).matcher()
    assert all(matcher.accept(token) for token in smollm.encode("2.1"))
    assert matcher.accept(2)
    with pytest.raises(GrammarError) as caught:
        compile_grammar(Regex("a["), smollm)
    assert caught.value.where == 1
    with pytest.raises(GrammarError, match=r"more than 1\.8 s"):
        compile_grammar(BOMB, smollm)


def test_workers_have_a_lower_priority_than_their_parent(small: Vocabulary) -> None:
    """They stay in their parent's session, because Linux divides CPU time between sessions regardless of niceness."""
    with contextlib.closing(CompilePool(small)) as pool:
        pool.start()
        results_of(pool, [pool.submit(Regex("[a-z]+"))])
        for pid in pids(pool):
            assert os.getsid(pid) == os.getsid(0)
            assert os.getpgid(pid) == pid  # so that Ctrl-C at the terminal does not reach them
            own = psutil.Process().nice()
            assert psutil.Process(pid).nice() > own or own == 19  # the lowest priority


def test_forced_text_beyond_the_limit_raises(small: Vocabulary) -> None:
    long = "x" * 20_000
    for spec, where in (
        (JsonSchema({"properties": {"a": {"const": long}}}), "/properties/a/const"),
        (JsonSchema({"enum": ["a", [{"b": long}]]}), "/enum"),
        (Ebnf(f'root ::= "{long}"+ root?'), None),
    ):
        with pytest.raises(GrammarError, match=r"more than 16384") as caught:
            compile_grammar(spec, small, deadline_s=60.0)
        assert caught.value.where == where
    described = JsonSchema({"type": "integer", "description": long})
    assert isinstance(compile_grammar(described, small), Grammar)
