"""What rank 0 and the other ranks send each other, and the channel between them: frames of msgspec on a socket pair.

    rank 0              rank i
    <- Started          its modules are imported
    -> Load             both connect to each other, and load their part of the model
    <- Loaded, Failed
    -> Allocate         the pages that every rank has
    -> Forward, Head    a step; every rank computes, rank 0 samples

A step's tokens are in the next step's `Forward`, so no rank but rank 0 decides anything.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from plait.host.frames import encode_frame, receive_frame
from plait.runtime.arrays import IntArray
from plait.runtime.config import EngineConfig
from plait.runtime.executor.batch_arrays import BatchArrays

MAX_MESSAGE_BYTES = 1 << 30


class Started(msgspec.Struct, tag="started"):
    """The rank can load a model."""


class Load(msgspec.Struct, tag="load"):
    """`rendezvous`: a path where the ranks' addresses are exchanged; it must not exist yet. "": they are connected."""

    config: EngineConfig
    model_path: str
    rendezvous: str = ""


class Loaded(msgspec.Struct, tag="loaded"):
    """`num_pages`: how many pages of KV the rank could hold."""

    num_pages: int


class Failed(msgspec.Struct, tag="failed"):
    """The rank cannot load the model, and ends. `kind`: the name of an error in `runtime.errors`."""

    kind: str
    text: str


class Allocate(msgspec.Struct, tag="allocate"):
    num_pages: int


class Forward(msgspec.Struct, tag="forward"):
    """The arrays of `BatchArrays`, then those of the shared prefixes: int32, little endian.

    ends: of the step's micro-batches, see `rank_runner.py`; without pipeline parallelism the number of new tokens.
    """

    arrays: list[bytes]
    ends: list[int]


class Head(msgspec.Struct, tag="head"):
    """The output head of `num_rows` hidden states, which rank 0 sends to the last stage; other stages do nothing.

    argmax: only the largest logits.
    """

    num_rows: int
    argmax: bool


ToRank = Load | Allocate | Forward | Head
FromRank = Started | Loaded | Failed


def forward_message(arrays: BatchArrays, shared: Sequence[IntArray], ends: list[int]) -> Forward:
    return Forward([array.astype("<i4", copy=False).tobytes() for array in (*arrays, *shared)], ends)


def forward_arrays(message: Forward) -> tuple[BatchArrays, list[IntArray]]:
    """The arrays of a message, and those of its shared prefixes."""
    arrays = [np.frombuffer(array, "<i4") for array in message.arrays]
    count = len(BatchArrays._fields)
    return BatchArrays(*arrays[:count]), arrays[count:]


class Channel:
    """One end of a stream socket that carries messages. Raises EOFError, or OSError, when the other end is gone."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._encoder = msgspec.msgpack.Encoder()
        self._to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

    def encode(self, message: ToRank | FromRank) -> bytes:
        return encode_frame(self._encoder.encode(message))

    def send_frame(self, frame: bytes) -> None:
        self.stream.sendall(frame)

    def receive_from_rank0(self) -> ToRank:
        return self._to_rank.decode(receive_frame(self.stream, MAX_MESSAGE_BYTES))

    def receive_from_rank(self, timeout_s: float) -> FromRank:
        """Raises TimeoutError if nothing has come after `timeout_s`."""
        self.stream.settimeout(timeout_s)
        try:
            return self._from_rank.decode(receive_frame(self.stream, MAX_MESSAGE_BYTES))
        finally:
            self.stream.settimeout(None)
