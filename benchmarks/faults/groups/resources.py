"""Resources that run out: descriptors, memory, disk."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from common.http import connect
from faults.figures import Figure, Scale, at_most, none_of, wait_until
from faults.served import Server, serve

LARGE = {"model": "default", "prompt": "The cat sat on the mat. " * 300, "max_tokens": 4, "temperature": 0}


def inflict(scale: Scale) -> Iterator[Figure]:
    yield from exhausted(scale)
    yield from http_process_without_memory()


def exhausted(scale: Scale) -> Iterator[Figure]:
    """Without descriptors, memory of the runtime, and disk space."""
    with serve() as server:
        canaries = server.canaries()
        yield from no_descriptors(server, scale.count(200, 60))
        yield no_memory(server, server.runtime(), "the runtime")
        server.wait_ready()
        yield server.same_answers("the same: answers afterwards", canaries)
    yield from full_disk(scale)


def http_process_without_memory() -> Iterator[Figure]:
    """What becomes of the server is not promised, and depends on which allocation fails."""
    with serve() as server:
        yield no_memory(server, server.own, "the HTTP process")

        def is_over() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return server.process.poll() is not None or server.is_ready()
            return False

        is_clear, code = wait_until(is_over, 60) < 60, server.process.poll()
        outcome = "the process lives" if code is None else f"the process ended with {code}"
        yield Figure("the same: afterwards", "answers, or has ended", outcome if is_clear else "it hangs", is_clear)


def no_descriptors(server: Server, count: int) -> Iterator[Figure]:
    """The HTTP process may open 20 descriptors more; then come `count` connections."""
    before = server.own.rlimit(psutil.RLIMIT_NOFILE)
    server.own.rlimit(psutil.RLIMIT_NOFILE, (server.own.num_fds() + 20, before[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(server.port))
        cpu, start = sum(server.own.cpu_times()[:2]), time.perf_counter()
        codes = [server.complete().status_code for _ in range(5)]
        time.sleep(2)
        used = (sum(server.own.cpu_times()[:2]) - cpu) / (time.perf_counter() - start)
    fault = f"{count} connections where 20 descriptors are left"
    failures = [str(code) for code in codes if code != 200]
    yield none_of(f"{fault}: requests of an open connection", failures, 5, "failed")
    yield at_most("the same: processor time meanwhile", 100 * used, 60, "% of a core", is_timed=True)

    def is_served() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{server.address}/health", timeout=5, verify=False).status_code == 200
        return False

    yield at_most("the same: a new connection afterwards", wait_until(is_served, 30), 3, "s", is_timed=True)
    server.own.rlimit(psutil.RLIMIT_NOFILE, before)


def no_memory(server: Server, process: psutil.Process, name: str) -> Figure:
    """A process may map no more memory while 16 large requests arrive: they may fail, not be answered wrongly."""
    expected = server.http.post("/v1/completions", json=LARGE).json()["choices"][0]["text"]
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, before[1]))

    def ask(number: int) -> tuple[int, str]:
        body = LARGE if number % 2 else {**LARGE, "user": "x" * (7 << 20)}
        try:
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60, verify=False)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(psutil.RLIMIT_AS, before)
    wrong = [text[:60] for code, text in answers if code == 200 and text != expected]
    summary = dict(sorted(Counter(code for code, _ in answers).items()))
    return none_of(f"no memory for {name}: 16 requests ({summary})", wrong, len(answers), "wrong answers")


def full_disk(scale: Scale) -> Iterator[Figure]:
    """TMPDIR and the log on a file system of 1 MiB, which is then filled; and a start on a full one."""
    with small_file_system() as folder:
        if folder is None:
            yield Figure("a full disk", "served", "not tried: no file system can be mounted here (needs root)", True)
            return
        with (folder / "log").open("w") as log, serve(folder=folder, log=log) as server:
            canaries = server.canaries()
            fill(folder)
            codes = [server.http.get("/" + "x" * 200).status_code for _ in range(scale.count(2000, 100))]
            failures = [str(code) for code in codes if code != 404]
            failures += [] if server.canaries() == canaries else ["answers differ"]
            yield none_of("a full disk under TMPDIR and the log: requests", failures, len(codes) + 3, "failed")
        fill(folder)
        start = time.perf_counter()
        try:
            with serve(folder=folder) as server:
                outcome = "it starts and answers" if server.complete().status_code == 200 else "it does not answer"
        except RuntimeError as error:
            outcome = str(error)
        elapsed = time.perf_counter() - start
        is_clear = "Traceback" not in outcome and outcome != "it does not answer"
        measured = f"{outcome.splitlines()[-1][-120:]} after {elapsed:.1f} s"
        yield Figure("a start on a full disk", "it answers, or an error message", measured, is_clear)


@contextlib.contextmanager
def small_file_system() -> Iterator[Path | None]:
    """A mounted tmpfs of 1 MiB, or None where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="plait-full-") as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", name]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
