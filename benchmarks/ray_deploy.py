"""What `plait deploy` costs beside `plait serve`: start, memory, time to the first token, tokens per second.

Both serve the embedded model on this machine, with one replica, and are asked in turn: python benchmarks/ray_deploy.py
Processor time is that of the server's processes while it was asked; on a busy machine it says more than the clock.
"""

from __future__ import annotations

import concurrent.futures
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

ROUNDS, STREAMS, NUM_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 15, 8, 128
PROMPT = "The harbour master counted the boats twice each evening. " * 20
CONFIG = "replicas: {replicas}\ncpus: 2\ningress-cpus: 0\nport: {port}\n"


class Server:
    """A server's process, and how long it took until it answered."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.name, began = name, time.monotonic()
        command = [sys.executable, "-P", "-m", "plait.cli", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("plait serves at "), line
        self.start_s = time.monotonic() - began
        self.http = httpx.Client(base_url=line.split()[-1], timeout=60)

    def memory(self) -> float:
        """Bytes of all its processes; memory that several share counts in part in each."""
        root = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])

    def processor_s(self) -> dict[str, float]:
        """Processor time so far: of the runtime, of the process that answers HTTP, and of all others together."""
        root, seconds = psutil.Process(self.process.pid), dict.fromkeys(("runtime", "http", "others"), 0.0)
        for process in [root, *root.children(recursive=True)]:
            line, times = " ".join(process.cmdline()), process.cpu_times()
            is_http = ":ingress" in line or (process == root and self.name == "serve")
            role = "runtime" if "process.worker" in line else "http" if is_http else "others"
            seconds[role] += times.user + times.system
        return seconds

    def request(self, prompt: str, max_tokens: int) -> tuple[float, float]:
        """Seconds to the first event of a stream, and to its end."""
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        began, first = time.monotonic(), 0.0
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                first = first or (time.monotonic() - began if line else 0.0)
        return first, time.monotonic() - began

    def first_token(self, number: int) -> float:
        return self.request(f"{number} {PROMPT}", 4)[0]

    def short(self, number: int) -> float:
        return self.request("Hello", 1)[1]

    def throughput(self, number: int) -> float:
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda index: self.request(f"{number} {index} boats", NUM_TOKENS), range(STREAMS)))
        return STREAMS * NUM_TOKENS / (time.monotonic() - began)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def compare(first: Server, second: Server, measure: Callable[[Server, int], float]) -> list[tuple[float, float]]:
    """Alternates the two servers; the one that begins changes each round. Prints the processor time of a round."""
    pairs = []
    used: dict[str, list[dict[str, float]]] = {first.name: [], second.name: []}
    for number in range(ROUNDS):
        order, values = (first, second) if number % 2 else (second, first), {}
        for server in order:
            before = server.processor_s()
            values[server.name] = measure(server, number)
            used[server.name].append({role: after - before[role] for role, after in server.processor_s().items()})
        pairs.append((values[first.name], values[second.name]))
    for name, rounds in used.items():
        means = {role: 1e3 * statistics.mean(seconds[role] for seconds in rounds) for role in rounds[0]}
        print(f"  {name}: processor time {', '.join(f'{role} {mean:.0f} ms' for role, mean in means.items())}")
    return pairs


def quartiles(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deploy.yaml"
        path.write_text(CONFIG.format(replicas=1, port=port))
        serve = Server("serve", "serve", "--port", "0")
        deployed = Server("deploy", "deploy", str(path), "--address", "local")
        try:
            print(f"Python {platform.python_version()}, {psutil.cpu_count()} cores, {ROUNDS} rounds")
            for server in (serve, deployed):
                server.throughput(-1)
                print(f"{server.name}: start {server.start_s:.1f} s, memory {server.memory() / 1e6:.0f} MB")
            for name, measure in (("first token, 240 prompt tokens", Server.first_token), ("one token", Server.short)):
                pairs = compare(serve, deployed, measure)
                alone = quartiles([1e3 * alone for alone, _ in pairs], ".1f")
                added = quartiles([1e3 * (behind - alone) for alone, behind in pairs], ".1f")
                print(f"{name}: serve {alone} ms, deploy adds {added} ms")
            pairs = compare(serve, deployed, Server.throughput)
            print(f"{STREAMS} streams: serve {quartiles([alone for alone, _ in pairs], '.0f')} tokens/s,", end=" ")
            print(f"deploy relative to it {quartiles([behind / alone for alone, behind in pairs], '.3f')}")
        finally:
            deployed.close()
            serve.close()


if __name__ == "__main__":
    main()
