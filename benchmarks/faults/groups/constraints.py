"""Hostile schemas, patterns and grammars over HTTP: what each costs, and what they cost another key."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from common.expensive_constraints import EXPENSIVE_SPECS, slow
from common.http import LONG, open_stream, reset
from faults.figures import Figure, Scale, at_most, none_of
from faults.served import KEYS, Server, serve

from plait.constrained import Choices, Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec
from plait.constrained.compile_service.pool import LONG_BYTES

DEADLINE_S = 2.0  # --compile-deadline
MAX_COMPILE_S = 2.2  # of processor time of all compile processes, for one answer
LATEST_S = 10 * DEADLINE_S  # by the clock: workers have the lowest priority
SHORT = ("patterns", "regex_three", "members", "one_of", "reference_chain", "deep")


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve(has_keys=True) as server:
        canaries, pid = server.canaries(), server.runtime().pid
        yield from expensive(server, scale)
        yield from other_tenant(server, scale.count(20, 4))
        yield clients_that_leave(server, scale.count(20, 4))
        kept = server.runtime().pid == pid and server.canaries() == canaries and not server.num_tracebacks()
        yield none_of("after all of these: the answers", [] if kept else ["differ, or it restarted"], 3, "differ")


def field(spec: Spec) -> str:
    """The field of a completion that asks for a constraint, as JSON. A schema's text is not parsed: it may be deep."""
    if isinstance(spec, JsonSchema):
        return f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {spec.text}}}}}'
    if isinstance(spec, Regex):
        return f'"regex": {json.dumps(spec.pattern)}'
    if isinstance(spec, Choices):
        return f'"choices": {json.dumps(spec.choices)}'
    if isinstance(spec, Ebnf):
        return f'"ebnf": {json.dumps(spec.grammar)}'
    assert isinstance(spec, Lark)
    return f'"lark": {json.dumps(spec.grammar)}'


def ask(server: Server, key: str, constraint: str, timeout_s: float = 60) -> int:
    """The status of the answer to a completion with this field."""
    body = f'{{"model": "default", "prompt": "One", "max_tokens": 1, "temperature": 0, {constraint}}}'
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    url = f"{server.address}/v1/completions"
    return httpx.post(url, content=body, headers=headers, timeout=timeout_s, verify=False).status_code


def compile_seconds(server: Server) -> float:
    """The processor time of the runtime's compile processes, ended ones included."""
    runtime = server.runtime()
    total = runtime.cpu_times().children_user + runtime.cpu_times().children_system
    for process in runtime.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def expensive(server: Server, scale: Scale) -> Iterator[Figure]:
    """Each spec beside four streams; the first answer, which no cache has."""
    streams = [open_stream(server.port, LONG, server.key)[0] for _ in range(4)]
    times: dict[str, float] = {}
    compile_times: dict[str, float] = {}
    limits: dict[str, float] = {}
    failures = []
    for name, make in EXPENSIVE_SPECS.items():
        if scale.is_short and name not in SHORT:
            continue
        try:
            constraint = field(make())
        except GrammarError:
            continue  # refused before it can be sent
        limits[name] = round(MAX_COMPILE_S * (1 + min(1.0, len(constraint) / LONG_BYTES)), 2)
        start, compile_start = time.perf_counter(), compile_seconds(server)
        code = ask(server, KEYS[0], constraint)
        times[name] = time.perf_counter() - start
        compile_times[name] = compile_seconds(server) - compile_start
        if code not in (200, 400):
            failures.append(f"{name}: {code}")
    for stream in streams:
        reset(stream)
    first, *others = times
    slowest = max(others, key=lambda name: times[name])
    fault = f"{len(times)} expensive constraints beside 4 streams"
    yield at_most(f"{fault}: the slowest answer but the first", times[slowest], LATEST_S, "s", slowest, is_timed=True)
    yield at_most("the same: the first, while compile processes start", times[first], 3.2, "s", first, is_timed=True)
    dearest = max(others, key=lambda name: compile_times[name] / limits[name])
    yield at_most("the same: processor time of compiling", compile_times[dearest], limits[dearest], "s", dearest)
    yield none_of(f"{fault}: answers", failures, len(times), "neither 200 nor 400")


def other_tenant(server: Server, count: int) -> Iterator[Figure]:
    """One key has `count` slow schemas waiting; another asks for small ones."""
    times = []
    with ThreadPoolExecutor(count) as pool:
        slow_ones = [pool.submit(ask, server, KEYS[0], field(slow(number)), 90) for number in range(count)]
        time.sleep(0.5)
        for number in range(5):
            start = time.perf_counter()
            code = ask(server, KEYS[1], field(JsonSchema({"type": "integer", "minimum": number})))
            times.append(time.perf_counter() - start if code == 200 else float("inf"))
    fault = f"{count} slow schemas of one key: a small one of another"
    yield at_most(fault, 1000 * max(times), 1000, "ms", is_timed=True)
    failures = [str(call.result()) for call in slow_ones if call.result() not in (400, 503)]
    yield none_of("the same: the slow ones", failures, count, "not refused")


def clients_that_leave(server: Server, count: int) -> Figure:
    """Clients of slow schemas leave after 0.3 s: the same key's next small schema does not wait for theirs."""
    for number in range(count):
        try:
            ask(server, KEYS[0], field(slow(100 + number)), timeout_s=0.3)
        except httpx.TimeoutException:
            continue
    start = time.perf_counter()
    code = ask(server, KEYS[0], field(slow(200)))
    elapsed = time.perf_counter() - start if code == 400 else float("inf")
    fault = f"{count} clients of slow schemas leave: the next slow one is refused in"
    return at_most(fault, elapsed, DEADLINE_S + 1, "s", is_timed=True)
