"""The messages between a compile pool and its child processes, and the frames they travel in.

Knows: bytes. Must not know: processes, files, or how anything compiles. A frame is a length, four bytes in
little-endian order, and then that many bytes of msgpack; nothing on the wire is code or can name any.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.specs import Spec

MAX_FRAME_BYTES = 256 << 20
_HEADER_BYTES = 4


class WorkerInit(msgspec.Struct, frozen=True, tag="hello"):
    """To the child, once: the vocabulary, and how many bytes of address space it may take beyond its own."""

    token_bytes: list[bytes]
    eos_ids: list[int]
    memory_bytes: int


class CompileJob(msgspec.Struct, frozen=True, tag="job"):
    """To the child: compile `spec`; it ends itself after `limit_s` seconds, should nobody else."""

    spec: Spec
    limit_s: float


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """From the child: the vocabulary is in place."""


class TokenDfaArrays(msgspec.Struct, frozen=True, tag="arrays"):
    """From the child: the arrays of a Table, int32 little-endian but for `accepting`, one byte each."""

    row_offsets: bytes
    tokens: bytes
    next_states: bytes
    accepting: bytes
    distance: bytes


class CompileRefused(msgspec.Struct, frozen=True, tag="refused"):
    """From the child: the parts of a GrammarError."""

    reason: str
    where: int | str | None


class CompileResult(msgspec.Struct, frozen=True, tag="done"):
    """From the child: the answer to a job, and how many seconds it took there."""

    answer: TokenDfaArrays | LlguidanceSource | CompileRefused
    spent_s: float


ToWorker: TypeAlias = WorkerInit | CompileJob
FromWorker: TypeAlias = WorkerReady | CompileResult


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """A message as a frame.

    >>> framed(Ready())
    b'\\x0c\\x00\\x00\\x00\\x81\\xa4type\\xa5ready'
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


def pop_frame(buffer: bytearray) -> bytes | None:
    """The body of the first frame, cut off the front of `buffer`; None while it is incomplete.

    ValueError for a frame of more than 256 MiB: whoever sent it is not to be listened to.

    >>> pop_frame(bytearray(b"\\x02\\x00\\x00\\x00abc"))
    b'ab'
    """
    if len(buffer) < _HEADER_BYTES:
        return None
    length = int.from_bytes(buffer[:_HEADER_BYTES], "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError("the frame is too long")
    end = _HEADER_BYTES + length
    if len(buffer) < end:
        return None
    with memoryview(buffer) as view:
        body = bytes(view[_HEADER_BYTES:end])
    del buffer[:end]
    return body


def pack_dfa(table: TokenDfa) -> TokenDfaArrays:
    """A Table as bytes."""
    columns = (table.row_offsets, table.tokens, table.next_states, table.distance)
    row_offsets, tokens, next_states, distance = (column.astype("<i4").tobytes() for column in columns)
    return TokenDfaArrays(row_offsets, tokens, next_states, table.accepting.astype(np.uint8).tobytes(), distance)


def unpack_dfa(arrays: TokenDfaArrays) -> TokenDfa:
    """The Table of `pack_dfa`; read-only views of its bytes."""
    columns = (arrays.row_offsets, arrays.tokens, arrays.next_states, arrays.distance)
    row_offsets, tokens, next_states, distance = (np.frombuffer(column, "<i4") for column in columns)
    return TokenDfa(row_offsets, tokens, next_states, np.frombuffer(arrays.accepting, np.bool_), distance)
