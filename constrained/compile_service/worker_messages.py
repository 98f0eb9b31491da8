"""The messages between a compile pool, its template process and its workers, and their encoding in frames.

They are frames of msgpack on a socket pair (`plait/host/frames.py`). No message holds code or names any.
What the pool requests of its template has four bytes instead, and the worker's socket where a worker is forked.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.specs import Spec
from plait.host.frames import encode_frame

MAX_FRAME_BYTES = 256 << 20
_PID_BYTES = 4


class WorkerInit(msgspec.Struct, frozen=True, tag="hello"):
    """To the template, once: the vocabulary, and how many bytes the address space of a worker may grow."""

    token_bytes: list[bytes]
    eos_ids: list[int]
    memory_bytes: int
    control_texts: dict[int, str] = {}


class CompileJob(msgspec.Struct, frozen=True, tag="job"):
    """To the worker: compile `spec`. The worker ends itself after `limit_s` seconds if the pool has not ended it.

    `is_lowered`: from now on, the worker takes only the processor time that nothing else wants.
    """

    spec: Spec
    limit_s: float
    is_lowered: bool = False


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """From the template: the vocabulary is loaded. From a worker: it waits for jobs. `pid` is that of the sender."""

    pid: int


class TokenDfaArrays(msgspec.Struct, frozen=True, tag="arrays"):
    """From the worker: a TokenDfa. Arrays are int32 little-endian; `accepting` and `partition_of` have one byte for
    each state."""

    partitions: list[bytes]
    partition_of: bytes
    row_offsets: bytes
    nodes: bytes
    next_states: bytes
    accepting: bytes
    distance: bytes


class CompileRefused(msgspec.Struct, frozen=True, tag="refused"):
    """From the worker: the parts of a GrammarError."""

    reason: str
    where: int | str | None


class CompileResult(msgspec.Struct, frozen=True, tag="done"):
    """From the worker: the result of a job and the CPU seconds that it took."""

    answer: TokenDfaArrays | LlguidanceSource | CompileRefused
    spent_s: float


FromWorker: TypeAlias = WorkerReady | CompileResult


def encode(message: WorkerInit | CompileJob | FromWorker) -> bytes:
    """Returns `message` as a frame.

    >>> encode(WorkerReady(7))
    b'\\x11\\x00\\x00\\x00\\x82\\xa4type\\xa5ready\\xa3pid\\x07'
    """
    return encode_frame(msgspec.msgpack.encode(message))


def pack_dfa(table: TokenDfa) -> TokenDfaArrays:
    """Returns the arrays of `table` as bytes."""
    columns = (table.row_offsets, table.nodes, table.next_states, table.distance)
    row_offsets, nodes, next_states, distance = (column.astype("<i4").tobytes() for column in columns)
    accepting = table.accepting.astype(np.uint8).tobytes()
    partition_of = table.partition_of.tobytes()
    return TokenDfaArrays(list(table.partitions), partition_of, row_offsets, nodes, next_states, accepting, distance)


def unpack_dfa(arrays: TokenDfaArrays) -> TokenDfa:
    """Returns the TokenDfa that `pack_dfa` encoded, as read-only views of its bytes."""
    columns = (arrays.row_offsets, arrays.nodes, arrays.next_states, arrays.distance)
    row_offsets, nodes, next_states, distance = (np.frombuffer(column, "<i4") for column in columns)
    accepting = np.frombuffer(arrays.accepting, np.bool_)
    partition_of = np.frombuffer(arrays.partition_of, np.uint8)
    return TokenDfa(tuple(arrays.partitions), partition_of, row_offsets, nodes, next_states, accepting, distance)


class ControlRequest(NamedTuple):
    """`pid`: the killed worker to reap, or 0. `connection`: the socket of the worker to fork, or None."""

    pid: int
    connection: socket.socket | None


def send_fork(control: socket.socket, connection: socket.socket) -> None:
    """Requests a worker that serves `connection`, which the caller may close then. Raises OSError."""
    socket.send_fds(control, [bytes(_PID_BYTES)], [connection.fileno()])


def send_reap(control: socket.socket, pid: int) -> None:
    """Says that a worker was killed, and that its process id may be used again. Raises OSError."""
    control.send(pid.to_bytes(_PID_BYTES, "little"))


def receive_control(control: socket.socket) -> ControlRequest | None:
    """Waits for the next request; returns None when the socket is closed."""
    data, fds, _, _ = socket.recv_fds(control, _PID_BYTES, 1)
    if len(data) < _PID_BYTES:
        return None
    return ControlRequest(int.from_bytes(data, "little"), socket.socket(fileno=fds[0]) if fds else None)
