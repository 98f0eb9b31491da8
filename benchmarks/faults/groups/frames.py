"""Mutated and foreign frames: to the runtime of a server, to a scheduler and to clients in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import frame_flood
import zmq
from faults.figures import Figure, Scale, at_most
from faults.served import Server, serve
from frame_mutations import FrameMutator

from plait.runtime.errors import RUNTIME_EXITED
from plait.runtime.transport.zmq_client import ZmqConnection


def inflict(scale: Scale) -> Iterator[Figure]:
    yield from flood_of_a_server(scale.count(scale.frames // 5, 500))
    for flood, share in ((frame_flood.flood_sockets, 0.02), (frame_flood.flood_client, 0.2)):
        yield in_process(flood, max(200, int(scale.count(scale.frames, 2000) * share)))
    yield in_process(frame_flood.flood_scheduler, scale.count(scale.frames, 2000))


def in_process(flood, num_frames: int) -> Figure:
    """The floods assert that nothing is left behind and that a client is answered normally afterwards."""
    start = time.perf_counter()
    try:
        counts = dict(flood(num_frames, 0))
    except AssertionError as error:
        return Figure(f"{flood.__name__}, {num_frames:,} frames", "intact", f"broken: {error}"[:200], False)
    grown = counts.get("grown_kib", 0) / 1024
    measured = f"intact after {time.perf_counter() - start:.0f} s, {counts.get('invalid', 0):,} messages invalid, "
    return Figure(f"{flood.__name__}, {num_frames:,} frames", "intact", f"{measured}grew {grown:.1f} MiB", True)


def flood_of_a_server(num_frames: int) -> Iterator[Figure]:
    with serve() as server:
        canaries, pid = server.canaries(), server.runtime().pid
        corpus = frame_flood.client_frames(0)
        mutator = FrameMutator(0, corpus)
        send(server, mutator, num_frames // 5)  # the first ones also fill the prefix cache
        before = server.memory()
        send(server, mutator, num_frames - num_frames // 5)
        server.wait_ready()
        after = server.memory()
        fault = f"{num_frames:,} mutated frames to the runtime of a server"
        kept = server.runtime().pid == pid and server.canaries() == canaries and not server.num_tracebacks()
        measured = "it lives, its answers are the same" if kept else "it ended, or its answers differ"
        yield Figure(fault, "lives; the same answers", measured, kept)
        yield at_most(f"{fault}: the runtime grows", after["runtime"] - before["runtime"], 64, "MiB")


def send(server: Server, mutator: FrameMutator, num_frames: int) -> None:
    directory, num_sent = server.runtime_directory(), 0
    while num_sent < num_frames:
        connection = ZmqConnection(directory)
        connection.handshake(lambda: RUNTIME_EXITED)
        connection.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        with contextlib.suppress(zmq.Again):
            for frame in mutator.corpus:
                connection.socket.send(mutator.mutate(frame))
                num_sent += 1
        frame_flood.send_garbage(directory, mutator)
        connection.close()
