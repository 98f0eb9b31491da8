"""What HTTP and ZeroMQ cost: a server beside an engine in one process, asked for the same text in turns.

    python benchmarks/serving_overhead.py [--streams 64] [--tokens 64] [--rounds 9] [--clock MS] [--weights FORM] [--refusals]

With `--clock` the model is a clock whose step takes so many milliseconds and no processor, as one on a device would;
without, it is the embedded one, and its threads, the server and this program share the machine. The server is
`plait serve`'s own code with its log.

Everything is measured in rounds, each once here and once there, first the one and then the other in turns; a figure is
the median of the rounds' own ratios or differences, with their quartiles. Beside them stands the processor time of each
process, which scatters far less, and this program's, which a machine whose clients are elsewhere would not spend.
`--refusals`: how soon wrong bodies are refused.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from server_comparison.signals import unwind_on_signal
from serving.http_load import Stream, one, run, under_load

SERVE = """
import json, sys
from plait.runtime.process.runtime import Runtime
from plait.runtime.server import restarting, serve
from plait.runtime.server.settings import server_settings
restarting.Runtime = lambda model, **settings: Runtime.connect(sys.argv[1])
sys.exit(serve.serve(None, server_settings(port=int(sys.argv[2]))))
"""
RUNTIME = """
import json, sys
from plait.runtime.process.runtime import Runtime
with Runtime(progress=False, prompt_lookup=False, **json.loads(sys.argv[1])) as runtime:
    print(json.dumps([runtime.address, runtime.pid]), flush=True)
    sys.stdin.read()
"""
HERE = Path(__file__).parent / "serving"
STOP_S = 20.0
PROBES = 12  # requests of a round, one at a time


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
    """Ends a process with the block: it reads its end from standard input, or the signal tells it, or ends it."""
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prompts(count: int, about: str) -> list[str]:
    return [f"Tell me about the number {i} of {about} and " for i in range(count)]


class Rounds:
    """What the rounds gave, by name; each is told at the end with its spread."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._found.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self._found[name])

    def spread(self, name: str, form: str = ".2f") -> str:
        """The median and the quartiles."""
        low, middle, high = statistics.quantiles(self._found[name], n=4, method="inclusive")
        return f"{middle:{form}} ({low:{form}} to {high:{form}})"


class SideBySide:
    """An engine in one process and a server, asked for the same in turns."""

    def __init__(self, options: argparse.Namespace, engine: InProcess, port: int, cpus: dict[str, Cpu]) -> None:
        self.options, self.engine, self.cpus = options, engine, cpus
        self.probe = Stream(port)
        self.streams = [Stream(port) for _ in range(options.streams)]
        self.port, self.rounds = port, Rounds()

    def in_turns(self, number: int, here: Callable[[], Any], there: Callable[[], Any]) -> tuple[Any, Any]:
        """Both, the one that is first changing from round to round."""
        if number % 2:
            second = there()
            return here(), second
        return here(), there()

    def throughput(self, number: int) -> None:
        """All streams at once; each round has prompts of its own."""
        count = self.options.streams * self.options.tokens
        texts = prompts(self.options.streams, f"round {number}")

        def there() -> tuple[float, dict[str, float]]:
            for cpu in self.cpus.values():
                cpu.spent()
            own = time.process_time()
            wall_s = run(self.streams, texts, self.options.tokens)["wall_s"]
            return wall_s, {name: cpu.spent() for name, cpu in self.cpus.items()} | {"load": time.process_time() - own}

        (alone, alone_cpu), (wall_s, spent) = self.in_turns(
            number, lambda: self.engine.ask("run", texts, self.options.tokens), there
        )
        self.rounds.add(ratio=alone["wall_s"] / wall_s, here=count / alone["wall_s"], there=count / wall_s)
        self.rounds.add(
            engine_us=alone_cpu / count * 1e6, **{f"{name}_us": s / count * 1e6 for name, s in spent.items()}
        )

    def idle(self, number: int) -> None:
        """One request of one token at a time, with nothing else running."""
        text = "Tell me about the number "

        def there() -> list[float]:
            self.cpus["server"].spent()
            times = [one(self.probe, f"{number}.{i}: {text}") for i in range(PROBES)]
            self.rounds.add(request_us=self.cpus["server"].spent() / PROBES * 1e6)
            return times

        (here, _), through = self.in_turns(number, lambda: self.engine.ask("one", f"{number}. {text}", PROBES), there)
        self.rounds.add(idle_here=median_ms(here), idle_there=median_ms(through))
        self.rounds.add(idle_more=median_ms(through) - median_ms(here))

    def loaded(self, number: int) -> None:
        """One request at a time while all but one of the streams are answered."""
        texts = prompts(self.options.streams, f"many {number}")
        step_s = self.options.clock / 1e3 or 0.025
        pauses = [(i * 7 % PROBES + 0.5) / PROBES * step_s for i in range(PROBES)]  # at every part of a step

        def there() -> list[float]:
            streams = [Stream(self.port) for _ in range(self.options.streams - 1)]
            times = under_load(streams, texts, self.probe, pauses)
            for each in streams:
                each.socket.close()
            return times

        (here, _), through = self.in_turns(number, lambda: self.engine.ask("under_load", texts, pauses), there)
        self.rounds.add(loaded_here=statistics.mean(here) * 1e3, loaded_there=statistics.mean(through) * 1e3)
        self.rounds.add(loaded_more=(statistics.mean(through) - statistics.mean(here)) * 1e3)

    def tell(self) -> None:
        found, options = self.rounds, self.options
        net = found.median("server_us") - found.median("request_us") / options.tokens
        print(
            f"{options.rounds} rounds: medians (and quartiles)\n"
            f"tokens/s of {options.streams} streams: {found.spread('here', '.0f')} in process, "
            f"{found.spread('there', '.0f')} through the server\n"
            f"through the server over in process: {found.spread('ratio', '.3f')}\n"
            f"first token, idle, ms: {found.spread('idle_here')} in process, {found.spread('idle_there')} through the "
            f"server: more by {found.spread('idle_more')}\n"
            f"first token beside {options.streams - 1} streams, mean, ms: {found.spread('loaded_here')} in process, "
            f"{found.spread('loaded_there')} through the server: more by {found.spread('loaded_more')}\n"
            f"processor, us a token: in process {found.spread('engine_us', '.1f')}; server "
            f"{found.spread('server_us', '.1f')}, of it {net:.1f} beside the requests; runtime "
            f"{found.spread('runtime_us', '.1f')}; this program {found.spread('load_us', '.1f')}\n"
            f"the server's processor, us a request: {found.spread('request_us', '.0f')}",
            flush=True,
        )


def compare(side_by_side: SideBySide) -> None:
    """All rounds, after one that is not counted."""
    warm = prompts(side_by_side.options.streams, "the first round")
    run(side_by_side.streams, warm, 4)
    side_by_side.engine.ask("run", warm, 4)
    for number in range(side_by_side.options.rounds):
        side_by_side.throughput(number)
        side_by_side.idle(number)
        side_by_side.loaded(number)
    side_by_side.tell()


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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", type=float, default=0.0)
    parser.add_argument("--weights", default="as-stored")
    parser.add_argument("--refusals", action="store_true")
    options = parser.parse_args()
    unwind_on_signal()
    with runtime(options) as (address, runtime_pid), server(address) as (port, pid):
        if options.refusals:
            refusals(port)
            return
        engine = InProcess(options)
        with ended(engine.process):
            cpus = {"server": Cpu(pid), "runtime": Cpu(runtime_pid)}
            compare(SideBySide(options, engine, port, cpus))


if __name__ == "__main__":
    main()
