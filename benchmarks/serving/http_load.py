"""A load generator for streams over HTTP/1.1: one thread that does as little as possible, since it is not measured."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from common.http import request

STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Stream:
    """One persistent connection, which carries one request at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.start = self.first_token = 0.0
        self.num_events = 0
        self._tail = b""

    def ask(self, prompt: str, max_tokens: int) -> None:
        """Sends the request."""
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        content = request("/v1/completions", body | {"stream": True})
        self.start, self.first_token, self.num_events, self._tail = time.perf_counter(), 0.0, 0, b""
        self.socket.sendall(content)

    def read(self) -> bool:
        """Reads the bytes available. Returns True at the end of the response."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        num_events = data.count(b"data: ")
        if num_events and not self.first_token:
            self.first_token = time.perf_counter()
        self.num_events += num_events
        self._tail = (self._tail + data)[-32:]
        return self._tail.endswith(STREAM_END)


def run(streams: list[Stream], prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Runs all streams at once. Returns the seconds until the last one ended, and to each one's first token."""
    poll = select.epoll()
    by_fd = {stream.socket.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    start, num_running = time.perf_counter(), len(streams)
    for stream, prompt in zip(streams, prompts, strict=True):
        stream.ask(prompt, max_tokens)
    while num_running:
        for fd, _ in poll.poll():
            num_running -= by_fd[fd].read()
    poll.close()
    events = sum(stream.num_events - 1 for stream in streams)
    ttft_s = [stream.first_token - stream.start for stream in streams]
    return {"wall_s": time.perf_counter() - start, "first_s": ttft_s, "events": events}


def single_ttft(stream: Stream, prompt: str) -> float:
    """Returns the seconds to the first token of an answer of one token."""
    stream.ask(prompt, 1)
    while not stream.read():
        pass
    return stream.first_token - stream.start


def ttft_under_load(streams: list[Stream], prompts: list[str], probe: Stream, pauses: list[float]) -> list[float]:
    """Returns the seconds to the first token of sequential requests on `probe`, while `streams` are running.

    Each request waits for its pause first. The streams are still running at the end: close them.
    """
    poll = select.epoll()
    by_fd = {stream.socket.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    for stream, prompt in zip(streams, prompts, strict=False):
        stream.ask(prompt, 4096)
    while not all(stream.first_token for stream in streams):
        for fd, _ in poll.poll():
            by_fd[fd].read()
    poll.register(probe.socket.fileno(), select.EPOLLIN)
    by_fd[probe.socket.fileno()] = probe
    times: list[float] = []
    for number, pause in enumerate(pauses):
        due, is_sent, is_answered = time.perf_counter() + pause, False, False
        while not is_answered:
            if not is_sent and time.perf_counter() >= due:
                probe.ask(f"{number}: {prompts[-1]}", 1)
                is_sent = True
            for fd, _ in poll.poll(0.05 if is_sent else max(0.0, due - time.perf_counter())):
                is_end = by_fd[fd].read()
                is_answered = is_answered or (by_fd[fd] is probe and is_end)
        times.append(probe.first_token - probe.start)
    poll.close()
    return times
