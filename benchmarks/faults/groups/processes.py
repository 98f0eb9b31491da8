"""Processes that are killed or stopped: the scheduler, the compile processes, the server, the process group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

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


def ask_in_thread(server: Server, number: int, answers: dict[int, str]) -> threading.Thread:
    """A request that is not streamed; its text, or its error."""

    def ask() -> None:
        try:
            with httpx.Client(base_url=server.address, timeout=90, verify=False) as http:
                body = {"model": "default", "prompt": f"Tale {number}:", "max_tokens": 24, **SEEDED}
                answer = http.post("/v1/completions", json=body)
            answers[number] = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
        except httpx.HTTPError as error:
            answers[number] = f"{type(error).__name__}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def ask_all(server: Server, num_requests: int) -> tuple[list[threading.Thread], dict[int, str]]:
    answers: dict[int, str] = {}
    return [ask_in_thread(server, number, answers) for number in range(num_requests)], answers


def killed_runtimes(scale: Scale) -> Iterator[Figure]:
    """SIGKILL of the scheduler under 8 requests and a stream, in as many servers as kills: later restarts back off."""
    restart_s, told_ms, lost, count = [], [], [], scale.count(5, 1)
    for round_ in range(count):
        with serve("--deterministic") as server:
            threads, expected = ask_all(server, 8)
            for thread in threads:
                thread.join(120)
            stream, _ = open_stream(server.port, LONG)
            threads, answers = ask_all(server, 8)
            time.sleep(0.05 + 0.2 * round_)
            server.runtime().kill()
            start = time.perf_counter()
            code = last_error(read_all(stream, 30, STREAM_END))
            told_ms.append(1000 * (time.perf_counter() - start) if code == "runtime_gone" else float("inf"))
            server.wait_ready()
            restart_s.append(time.perf_counter() - start)
            for thread in threads:
                thread.join(120)
            lost += [f"{answers.get(n, 'none')[:40]!r}" for n in range(8) if answers.get(n) != expected[n]]
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
    yield none_of("the same: its answers", [] if server.canaries() == canaries else ["differ"], 3, "differ")


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
    threads, answers = ask_all(server, 4)
    time.sleep(0.1)
    os.killpg(server.process.pid, signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    code = server.process.wait(60)
    failures = [text[:60] for text in answers.values() if "error" in text or text.endswith("Error")]
    failures += [f"exit code {code}"] if code else []
    yield none_of("SIGTERM to the process group: running requests", failures, 4, "lost")
