"""Measures the overhead of HTTP and ZeroMQ: the server against an engine in one process, on the same requests.

    python benchmarks/serving_overhead.py [--streams 64] [--tokens 64] [--rounds 9] [--clock MS] [--weights FORM]

With `--clock` the model is simulated: a step takes that many milliseconds and no CPU time, as on a device. Without it,
the embedded model's threads, the server and this program share the machine. The server is `plait serve`'s own code with
its log.

Each round measures both, in alternating order; a figure is the median of the rounds' own ratios or differences, with
their quartiles. Each process's CPU time is printed too, which varies far less than wall time; this program's own share
would not be spent on a machine whose clients are elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.processes import CpuTimer, ended, free_port
from common.signals import unwind_on_signal
from serving.http_load import Stream, run, single_ttft, ttft_under_load

SERVE = """
import sys
from plait.runtime.process.runtime import Runtime
from plait.runtime.server import serve
from plait.runtime.server.engines import restarting_runtime
from plait.runtime.server.settings import server_settings
restarting_runtime.Runtime = lambda model, **settings: Runtime.connect(sys.argv[1])
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
PROBES = 12  # single requests per round


class InProcess:
    """A process with the engine, controlled by one JSON command per line."""

    def __init__(self, options: argparse.Namespace) -> None:
        arguments = json.dumps([options.clock / 1e3, max(64, options.streams + 1), settings_of(options)])
        command = [sys.executable, str(HERE / "in_process.py"), arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def ask(self, *command: Any) -> tuple[Any, float]:
        """Returns the answer and the CPU seconds it took."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        answer, cpu_s = json.loads(self.process.stdout.readline())
        return answer, cpu_s


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {"weights": options.weights, "max_batch_rows": max(64, options.streams + 1)}


@contextlib.contextmanager
def runtime(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Starts a runtime, simulated or with the embedded model. Yields its address and process id."""
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        if options.clock:
            arguments = [str(HERE / "fixed_step_runtime.py"), directory, str(options.clock), str(options.streams + 1)]
        else:
            arguments = ["-c", RUNTIME, json.dumps(settings_of(options))]
        command = [sys.executable, *arguments]
        with ended(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield (directory, process.pid) if options.clock else tuple(json.loads(line))


@contextlib.contextmanager
def server(address: str) -> Iterator[tuple[int, int]]:
    """Starts a server in front of a runtime. Yields its port and process id."""
    port = free_port()
    command = [sys.executable, "-c", SERVE, address, str(port)]
    quiet = subprocess.DEVNULL
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, stdin=subprocess.PIPE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield port, process.pid


def prompts(count: int, topic: str) -> list[str]:
    return [f"Tell me about the number {i} of {topic} and " for i in range(count)]


class Rounds:
    """The measured values of all rounds, by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self._values[name])

    def spread(self, name: str, form: str = ".2f") -> str:
        """Formats the median and the quartiles."""
        low, median, high = statistics.quantiles(self._values[name], n=4, method="inclusive")
        return f"{median:{form}} ({low:{form}} to {high:{form}})"


class SideBySide:
    """Measures an engine in one process and a server on the same requests, in alternating order."""

    def __init__(self, options: argparse.Namespace, engine: InProcess, port: int, cpus: dict[str, CpuTimer]) -> None:
        self.options, self.engine, self.cpus = options, engine, cpus
        self.probe = Stream(port)
        self.streams = [Stream(port) for _ in range(options.streams)]
        self.port, self.rounds = port, Rounds()

    def alternate(self, number: int, in_process: Callable[[], Any], served: Callable[[], Any]) -> tuple[Any, Any]:
        """Returns the results of both. Odd rounds measure the server first."""
        if number % 2:
            served_result = served()
            return in_process(), served_result
        return in_process(), served()

    def throughput(self, number: int) -> None:
        """Measures all streams at once, with other prompts in each round."""
        count = self.options.streams * self.options.tokens
        texts = prompts(self.options.streams, f"round {number}")

        def served() -> tuple[float, dict[str, float]]:
            for cpu in self.cpus.values():
                cpu.read()
            load_start = time.process_time()
            wall_s = run(self.streams, texts, self.options.tokens)["wall_s"]
            cpu_s = {name: cpu.read() for name, cpu in self.cpus.items()}
            return wall_s, cpu_s | {"load": time.process_time() - load_start}

        (engine, engine_cpu_s), (wall_s, cpu_s) = self.alternate(
            number, lambda: self.engine.ask("run", texts, self.options.tokens), served
        )
        self.rounds.add(
            ratio=engine["wall_s"] / wall_s, engine_tok_s=count / engine["wall_s"], server_tok_s=count / wall_s
        )
        self.rounds.add(
            engine_us=engine_cpu_s / count * 1e6, **{f"{name}_us": s / count * 1e6 for name, s in cpu_s.items()}
        )

    def idle(self, number: int) -> None:
        """Measures single requests of one token, with nothing else running."""
        text = "Tell me about the number "

        def served() -> list[float]:
            self.cpus["server"].read()
            times = [single_ttft(self.probe, f"{number}.{i}: {text}") for i in range(PROBES)]
            self.rounds.add(request_us=self.cpus["server"].read() / PROBES * 1e6)
            return times

        (engine_s, _), server_s = self.alternate(
            number, lambda: self.engine.ask("one", f"{number}. {text}", PROBES), served
        )
        self.rounds.add(idle_engine=median_ms(engine_s), idle_server=median_ms(server_s))
        self.rounds.add(idle_overhead=median_ms(server_s) - median_ms(engine_s))

    def loaded(self, number: int) -> None:
        """Measures single requests while all but one of the streams are running."""
        texts = prompts(self.options.streams, f"many {number}")
        step_s = self.options.clock / 1e3 or 0.025
        pauses = [(i * 7 % PROBES + 0.5) / PROBES * step_s for i in range(PROBES)]  # spread over a step

        def served() -> list[float]:
            streams = [Stream(self.port) for _ in range(self.options.streams - 1)]
            times = ttft_under_load(streams, texts, self.probe, pauses)
            for stream in streams:
                stream.socket.close()
            return times

        (engine_s, _), server_s = self.alternate(number, lambda: self.engine.ask("under_load", texts, pauses), served)
        engine_ms, server_ms = statistics.mean(engine_s) * 1e3, statistics.mean(server_s) * 1e3
        self.rounds.add(loaded_engine=engine_ms, loaded_server=server_ms, loaded_overhead=server_ms - engine_ms)

    def print_results(self) -> None:
        rounds, options = self.rounds, self.options
        net = rounds.median("server_us") - rounds.median("request_us") / options.tokens
        print(
            f"{options.rounds} rounds: medians (and quartiles)\n"
            f"tokens/s of {options.streams} streams: {rounds.spread('engine_tok_s', '.0f')} in process, "
            f"{rounds.spread('server_tok_s', '.0f')} through the server\n"
            f"server throughput relative to in process: {rounds.spread('ratio', '.3f')}\n"
            f"TTFT, idle, ms: {rounds.spread('idle_engine')} in process, {rounds.spread('idle_server')} through the "
            f"server: overhead {rounds.spread('idle_overhead')}\n"
            f"TTFT beside {options.streams - 1} streams, mean, ms: {rounds.spread('loaded_engine')} in process, "
            f"{rounds.spread('loaded_server')} through the server: overhead {rounds.spread('loaded_overhead')}\n"
            f"CPU, us per token: in process {rounds.spread('engine_us', '.1f')}; server "
            f"{rounds.spread('server_us', '.1f')}, {net:.1f} of it without the per-request cost; runtime "
            f"{rounds.spread('runtime_us', '.1f')}; this program {rounds.spread('load_us', '.1f')}\n"
            f"CPU of the server, us per request: {rounds.spread('request_us', '.0f')}",
            flush=True,
        )


def compare(side_by_side: SideBySide) -> None:
    """Runs a warm-up and then all rounds."""
    warm_up = prompts(side_by_side.options.streams, "the first round")
    run(side_by_side.streams, warm_up, 4)
    side_by_side.engine.ask("run", warm_up, 4)
    for number in range(side_by_side.options.rounds):
        side_by_side.throughput(number)
        side_by_side.idle(number)
        side_by_side.loaded(number)
    side_by_side.print_results()


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", type=float, default=0.0)
    parser.add_argument("--weights", default="as-stored")
    options = parser.parse_args()
    unwind_on_signal()
    with runtime(options) as (address, runtime_pid), server(address) as (port, pid):
        engine = InProcess(options)
        with ended(engine.process):
            cpus = {"server": CpuTimer(pid), "runtime": CpuTimer(runtime_pid)}
            compare(SideBySide(options, engine, port, cpus))


if __name__ == "__main__":
    main()
