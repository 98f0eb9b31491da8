"""What HTTP and ZeroMQ cost: a server beside an engine in one process, asked for the same text in turns.

    python benchmarks/server.py [--streams 64] [--tokens 64] [--rounds 3] [--clock MS] [--weights FORM] [--refusals]

With `--clock` the model is a clock whose step takes so many milliseconds and no processor, as one on a device would;
without, it is the embedded one, and its threads, the server and this program share the machine. The server is
`plait serve`'s own code with its log. Said beside the figures: each process's processor time for a token, and this
program's, which a machine whose clients are elsewhere would not spend. `--refusals`: how soon wrong bodies are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.load import Stream, one, run, under_load

SERVE = """
import json, sys
from plait.runtime.launch import Runtime
from plait.runtime.server import restarting, serve
from plait.runtime.server.settings import server_settings
restarting.Runtime = lambda model, **settings: Runtime.connect(sys.argv[1])
sys.exit(serve.serve(None, server_settings(port=int(sys.argv[2]))))
"""
RUNTIME = """
import json, sys
from plait.runtime.launch import Runtime
with Runtime(progress=False, prompt_lookup=False, **json.loads(sys.argv[1])) as runtime:
    print(json.dumps([runtime.address, runtime.pid]), flush=True)
    sys.stdin.read()
"""
HERE = Path(__file__).parent / "serving"
PROBES = 40


class Cpu:
    """Processor seconds of a process since this was made or last asked."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._before = self._now()

    def _now(self) -> float:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._tasks.iterdir()) / 1e9

    def spent(self) -> float:
        before, self._before = self._before, self._now()
        return self._before - before


class InProcess:
    """The engine's process, told what to do line by line."""

    def __init__(self, options: argparse.Namespace) -> None:
        given = json.dumps([options.clock / 1e3, max(64, options.streams + 1), settings_of(options)])
        command = [sys.executable, str(HERE / "in_process.py"), given]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def ask(self, *command: Any) -> tuple[Any, float]:
        """The answer, and the processor seconds it took."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        answer, cpu_s = json.loads(self.process.stdout.readline())
        return answer, cpu_s


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {"weights": options.weights, "max_batch_rows": max(64, options.streams + 1)}


@contextlib.contextmanager
def runtime(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(address, process id) of a runtime, the clock's or the embedded model's."""
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        if options.clock:
            own = [str(HERE / "clock_runtime.py"), directory, str(options.clock), str(options.streams + 1)]
        else:
            own = ["-c", RUNTIME, json.dumps(settings_of(options))]
        with ended(subprocess.Popen([sys.executable, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield (directory, process.pid) if options.clock else tuple(json.loads(said))


@contextlib.contextmanager
def server(address: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server in front of a runtime."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, address, str(port)]
    quiet = subprocess.DEVNULL
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, stdin=subprocess.PIPE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield port, process.pid


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Ends a process with the block: it reads its end from standard input, or the signal tells it."""
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.terminate()
        process.wait()


def prompts(count: int, about: str) -> list[str]:
    return [f"Tell me about the number {i} of {about} and " for i in range(count)]


def throughput(options: argparse.Namespace, engine: InProcess, port: int, cpus: dict[str, Cpu]) -> None:
    """The same number of streams, here and there in turns; each round has prompts of its own."""
    streams = [Stream(port) for _ in range(options.streams)]
    run(streams, prompts(options.streams, "the first round"), 4)
    engine.ask("run", prompts(options.streams, "the first round"), 4)
    num_tokens, ratios = options.streams * options.tokens, []
    for number in range(options.rounds):
        texts = prompts(options.streams, f"round {number}")
        alone, alone_cpu = engine.ask("run", texts, options.tokens)
        for cpu in cpus.values():
            cpu.spent()
        own = time.process_time()
        through = run(streams, texts, options.tokens)
        own = time.process_time() - own
        ratios.append(alone["wall_s"] / through["wall_s"])
        spent = ", ".join(f"{name} {cpu.spent() / num_tokens * 1e6:.1f}" for name, cpu in cpus.items())
        print(
            f"{options.streams} streams: {num_tokens / alone['wall_s']:.0f} tokens/s in process, "
            f"{num_tokens / through['wall_s']:.0f} through the server ({ratios[-1]:.3f}); first token "
            f"{median_ms(alone['first_s']):.1f} and {median_ms(through['first_s']):.1f} ms; CPU us a token: in process "
            f"{alone_cpu / num_tokens * 1e6:.1f}; {spent}, this program {own / num_tokens * 1e6:.1f}",
            flush=True,
        )
    print(f"median of {options.rounds} rounds: {statistics.median(ratios):.3f}", flush=True)


def first_token(options: argparse.Namespace, engine: InProcess, port: int, cpus: dict[str, Cpu]) -> None:
    """One request at a time: on an idle machine, then while all but one of the streams are answered."""
    stream = Stream(port)
    text = "Tell me about the number "
    here, _ = engine.ask("one", text, PROBES)
    cpus["server"].spent()
    there = [one(stream, f"{i}: {text}") for i in range(PROBES)]
    own = cpus["server"].spent() / PROBES
    print(
        f"first token, idle: {median_ms(here):.2f} ms in process, {median_ms(there):.2f} through the server "
        f"(+{median_ms(there) - median_ms(here):.2f}); the server's CPU for a request {own * 1e3:.2f} ms",
        flush=True,
    )
    texts = prompts(options.streams, "many")
    step_s = options.clock / 1e3 or 0.05
    pauses = [(i * 7 % PROBES + 0.5) / PROBES * step_s for i in range(PROBES)]  # at every part of a step
    here, _ = engine.ask("under_load", texts, pauses)
    streams = [Stream(port) for _ in range(options.streams - 1)]
    there = under_load(streams, texts, stream, pauses)
    for each in streams:
        each.socket.close()
    mean_here, mean_there = statistics.mean(here) * 1e3, statistics.mean(there) * 1e3
    print(
        f"first token beside {options.streams - 1} streams, mean: {mean_here:.2f} ms in process, {mean_there:.2f} "
        f"through the server (+{mean_there - mean_here:.2f})",
        flush=True,
    )


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def refusals(port: int) -> None:
    """How long wrong bodies take to be refused."""
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    good = json.dumps(chat).encode()
    long_prompt = chat | {"messages": [{"role": "user", "content": "ab " * 333_333}]}
    bodies = {
        "100,000 levels": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "10,000 stop strings": json.dumps(chat | {"stop": ["a"] * 10_000}).encode(),
        "a stop string of 1 MB": json.dumps(chat | {"stop": "a" * 1_000_000}).encode(),
        "a key 300,000 times": good[:-1] + b',"model":"default"' * 300_000 + b"}",
        "a prompt of 1 MB": json.dumps(long_prompt).encode(),
        "8 MiB and more": b'{"model":"' + b"a" * (8 << 20) + b'"}',
        "NaN": good[:-1] + b',"temperature":NaN}',
    }
    for name, body in bodies.items():
        times, status = [], b""
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                began = time.perf_counter()
                head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                with contextlib.suppress(ConnectionError):  # it need not read all of what it refuses
                    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                status = connection.recv(64)[9:12]
                times.append(time.perf_counter() - began)
        print(f"{name}: {status.decode()} after {median_ms(times):.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", type=float, default=0.0)
    parser.add_argument("--weights", default="as-stored")
    parser.add_argument("--refusals", action="store_true")
    options = parser.parse_args()
    with runtime(options) as (address, runtime_pid), server(address) as (port, pid):
        if options.refusals:
            refusals(port)
            return
        engine = InProcess(options)
        with ended(engine.process):
            cpus = {"server": Cpu(pid), "runtime": Cpu(runtime_pid)}
            throughput(options, engine, port, cpus)
            first_token(options, engine, port, cpus)


if __name__ == "__main__":
    main()
