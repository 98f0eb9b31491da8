"""Processes that are killed or stopped: the scheduler, the compile processes, the server, the process group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil
from common.http import LONG, STREAM_END, last_error, open_stream, read_all
from faults.figures import Figure, Scale, at_most, none_of, wait_until
from faults.served import Server, serve

SEEDED = {"temperature": 1, "seed": 7, "ignore_eos": True}


def inflict(scale: Scale) -> Iterator[Figure]:
    yield from killed_runtimes(scale)
    with serve("--stuck-after=8") as server:
        yield from stopped_runtime(server)
    with serve() as server:
        yield from killed_compilers(server, scale)
        yield from killed_server(server)
    with serve() as server:
        yield from group_terminated(server)


def text_of(server: Server, number: int) -> str:
    """The text of an answer that is not streamed, or its error."""
    body = {"model": "default", "prompt": f"Tale {number}:", "max_tokens": 24, **SEEDED}
    try:
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=90, verify=False)
    except httpx.HTTPError as error:
        return type(error).__name__
    text: str = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
    return text


def ask_all(server: Server, num_requests: int) -> Callable[[], list[str]]:
    """Begins requests in threads. Returns what waits for their texts."""
    pool = ThreadPoolExecutor(num_requests)
    texts = pool.map(partial(text_of, server), range(num_requests))
    return lambda: list(texts)


def killed_runtimes(scale: Scale) -> Iterator[Figure]:
    """SIGKILL of the scheduler under 8 requests and a stream, in as many servers as kills: later restarts back off."""
    restart_s, told_ms, lost, count = [], [], [], scale.count(5, 1)
    for round_ in range(count):
        with serve("--deterministic") as server:
            expected = ask_all(server, 8)()
            stream, _ = open_stream(server.port, LONG)
            answers = ask_all(server, 8)
            time.sleep(0.05 + 0.2 * round_)
            server.runtime().kill()
            start = time.perf_counter()
            code = last_error(read_all(stream, 30, STREAM_END))
            told_ms.append(1000 * (time.perf_counter() - start) if code == "runtime_gone" else float("inf"))
            server.wait_ready()
            restart_s.append(time.perf_counter() - start)
            lost += [f"{text[:40]!r}" for text, first in zip(answers(), expected, strict=True) if text != first]
    fault = f"{count} SIGKILLs of the scheduler under load"
    yield none_of(f"{fault}: requests that had sent nothing", lost, 8 * count, "lost or changed")
    yield at_most(f"{fault}: a stream gets its error", max(told_ms), 1000, "ms", is_timed=True)
    yield at_most(
        f"{fault}: ready again", max(restart_s), 3, "s", f"median {sorted(restart_s)[count // 2]:.2f} s", is_timed=True
    )


def stopped_runtime(server: Server) -> Iterator[Figure]:
    canaries, pid = server.canaries(), server.runtime().pid
    server.runtime().suspend()
    start = time.perf_counter()
    yield at_most("SIGSTOP of the scheduler: /ready is 503", wait_until(lambda: not server.is_ready(), 30), 5, "s")
    health = [] if server.http.get("/health").status_code == 200 else ["not 200"]
    yield none_of("the same: /health meanwhile", health, 1, "failures")
    replaced = wait_until(lambda: server.is_ready() and server.runtime().pid != pid, 60)
    replaced = time.perf_counter() - start if replaced < 60 else replaced
    yield at_most("the same: replaced after --stuck-after 8", replaced, 15, "s", is_timed=True)
    yield server.same_answers("the same: its answers", canaries)


def killed_compilers(server: Server, scale: Scale) -> Iterator[Figure]:
    """SIGKILL of all compile processes; the next constraint is new to the cache."""
    failures, count = [], scale.count(10, 2)
    for number in range(count):
        for compiler in server.compilers():
            compiler.kill()
        answer = server.complete("The code is ", 12, regex=f"[a-z]{{3}}{number}")
        if answer.status_code == 503:  # a process was killed before it had started
            answer = server.complete("The code is ", 12, regex=f"[a-z]{{3}}{number}")
        if answer.status_code != 200 or not answer.json()["choices"][0]["text"].endswith(str(number)):
            failures.append(f"{answer.status_code} {answer.text[:80]}")
    yield none_of(
        f"{count} SIGKILLs of all compile processes: constraints asked next, a 503 once again",
        failures,
        count,
        "failed",
    )


def killed_server(server: Server) -> Iterator[Figure]:
    family = server.own.children(recursive=True)
    server.process.kill()
    start = time.perf_counter()
    _, alive = psutil.wait_procs(family, 20)
    elapsed = float("inf") if alive else time.perf_counter() - start
    yield at_most(f"SIGKILL of the server: its {len(family)} other processes end", elapsed, 10, "s", is_timed=True)


def group_terminated(server: Server) -> Iterator[Figure]:
    """SIGTERM to the process group, as a terminal or a supervisor sends it."""
    answers = ask_all(server, 4)
    time.sleep(0.1)
    os.killpg(server.process.pid, signal.SIGTERM)
    failures = [text[:60] for text in answers() if "error" in text or text.endswith("Error")]
    code = server.process.wait(60)
    failures += [f"exit code {code}"] if code else []
    yield none_of("SIGTERM to the process group: running requests", failures, 4, "lost")
