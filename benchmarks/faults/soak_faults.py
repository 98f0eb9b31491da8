"""The faults of a soak, one function each: (server, random numbers)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache

import frame_flood
from common.expensive_constraints import slow
from common.http import LONG, connect, head, open_stream, request, reset
from faults.groups.constraints import ask, field
from faults.groups.frames import send
from faults.groups.programs import forked_program
from faults.served import Server
from frame_mutations import FrameMutator

UNREAD_S = 5.0


@cache
def _corpus() -> list[bytes]:
    return frame_flood.client_frames(0)


def leave_a_stream(server: Server, draw: random.Random) -> None:
    reset(open_stream(server.port, LONG)[0])


def leave_an_unread_stream(server: Server, draw: random.Random) -> None:
    connection, _ = open_stream(server.port, {**LONG, "logprobs": 20}, receive_buffer=4096)
    time.sleep(UNREAD_S)
    reset(connection)


def leave_a_body(server: Server, draw: random.Random) -> None:
    connection = connect(server.port)
    connection.sendall(head("/v1/completions", 100) + b"{")
    reset(connection)


def leave_a_program(server: Server, draw: random.Random) -> None:
    connection = connect(server.port)
    connection.sendall(request("/v1/programs", {"program": forked_program(6), "stream": draw.random() < 0.5}))
    time.sleep(draw.uniform(0, 0.5))
    reset(connection)


def send_a_malformed_body(server: Server, draw: random.Random) -> None:
    with connect(server.port) as connection:
        body = draw.randbytes(50)
        connection.sendall(head("/v1/chat/completions", len(body)) + body)
        connection.recv(4096)


def send_mutated_frames(server: Server, draw: random.Random) -> None:
    send(server, FrameMutator(draw.randrange(1 << 30), _corpus()), len(_corpus()))


def ask_with_a_slow_schema(server: Server, draw: random.Random) -> None:
    ask(server, "none", field(slow(draw.randrange(10_000))))


def ask_with_a_wrong_schema(server: Server, draw: random.Random) -> None:
    ask(server, "none", '"regex": "("')


def kill_a_compiler(server: Server, draw: random.Random) -> None:
    if compilers := server.compilers():  # there are none for a moment after the scheduler was killed
        draw.choice(compilers).kill()


FAULTS: dict[str, Callable[[Server, random.Random], None]] = {
    "streams left": leave_a_stream,
    "unread streams": leave_an_unread_stream,
    "bodies left": leave_a_body,
    "programs left": leave_a_program,
    "malformed bodies": send_a_malformed_body,
    "floods of frames": send_mutated_frames,
    "slow schemas": ask_with_a_slow_schema,
    "wrong patterns": ask_with_a_wrong_schema,
    "SIGKILLs of a compile process": kill_a_compiler,
}
