"""Measures how fast the server refuses invalid requests, and how fast it frees the pages of a disconnected client.

The targets: a refusal within 100 ms, also while the model is busy, and all pages free within 250 ms of a disconnect.
The median and the maximum of each are printed, in milliseconds.

    python benchmarks/serving_rejections.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time

from server_comparison.signals import unwind_on_signal

VALID = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"model": "default", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
KEY = "a-key"


def body(**changes: object) -> bytes:
    return json.dumps(VALID | changes).encode()


INVALID_BODIES = {
    "malformed JSON": body()[:-1],
    "NaN": body()[:-1] + b', "temperature": NaN}',
    "a lone surrogate": body().replace(b"hi", b"\\ud800"),
    "2^63": body(seed=2**63),
    "a NUL in a cache salt": body(cache_salt="\x00"),
    "10,000 stop strings": body(stop=["a"] * 10_000),
    "a stop string of 1 MB": body(stop="a" * 1_000_000),
    "JSON 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "a body of 9 MB": b'"' + b"a" * 9_000_000 + b'"',
    "a wrong content type": body(),
    "no key": body(),
}


class Client:
    """A client that opens a connection per request."""

    def __init__(self, address: str) -> None:
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)

    def ask(
        self, method: str, path: str, content: bytes = b"", kind: str = "application/json", key: str = KEY
    ) -> tuple:
        """Returns the milliseconds, the status and the body."""
        start = time.perf_counter()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        headers = {"content-type": kind, "authorization": f"Bearer {key}"}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request(method, path, content, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return 1000 * (time.perf_counter() - start), response.status, text

    def disconnect(self, stream: bool) -> float:
        """Returns the milliseconds from a disconnect until no page is held."""
        content = json.dumps(LONG | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        with socket.create_connection((self.host, self.port)) as connection:
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            while not self.num_held_pages():
                time.sleep(0.005)
            time.sleep(0.1)
        start = time.perf_counter()
        while self.num_held_pages():
            time.sleep(0.001)
        return 1000 * (time.perf_counter() - start)

    def num_held_pages(self) -> int:
        return json.loads(self.ask("GET", "/status")[2])["runtime"]["held_pages"]


def refusals(client: Client, rounds: int, state: str) -> None:
    for name, content in INVALID_BODIES.items():
        kind = "text/plain" if "content type" in name else "application/json"
        key = "" if name == "no key" else KEY
        answers = [client.ask("POST", "/v1/chat/completions", content, kind, key) for _ in range(rounds)]
        for _, status, text in answers:
            assert 400 <= status < 500 and "error" in json.loads(text), (name, status, text)
        print_row(f"{name}, {state}", [ms for ms, _, _ in answers])


def print_row(name: str, milliseconds: list[float]) -> None:
    print(f"{name:42} {statistics.median(milliseconds):8.1f} {max(milliseconds):8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    unwind_on_signal()
    command = [sys.executable, "-m", "plait.cli", "serve", "--port=0", f"--api-key={KEY}", "--drain-timeout=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        client = Client(server.stdout.readline().split()[-1])
        print(f"{'':42} {'median':>8} {'worst':>8}")
        refusals(client, rounds, "idle")
        busy = threading.Thread(
            target=client.ask, args=("POST", "/v1/completions", json.dumps(LONG | {"n": 8}).encode())
        )
        busy.daemon = True
        busy.start()
        refusals(client, rounds, "busy")
    finally:
        server.terminate()
        server.wait()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        client = Client(server.stdout.readline().split()[-1])
        for stream in (False, True):
            print_row(f"pages free, stream={stream}", [client.disconnect(stream) for _ in range(rounds)])
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
