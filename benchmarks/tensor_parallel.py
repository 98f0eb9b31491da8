"""The cost of a step's message to a rank, of tensor or pipeline parallelism: `python benchmarks/tensor_parallel.py`.

The message goes through a socket pair to another process, which decodes it and answers with one byte.
"""

from __future__ import annotations

import os
import socket
import statistics
import time

import numpy as np
import numpy.typing as npt

from plait.runtime.executor.batch_arrays import BatchArrays, starts
from plait.runtime.executor.distributed.rank_messages import Channel, Forward, forward_arrays, forward_message

ROUNDS = 200
STEPS = ((1, 512), (16, 1024), (16, 4096), (64, 1024), (64, 4096))  # (rows, tokens of context) of decode steps


def decode_step(pages: npt.NDArray[np.int32]) -> BatchArrays:
    """The arrays of a step in which every row decodes one token; its pages: [rows, context]."""
    rows, context = pages.shape
    counts, ends = np.ones(rows, np.int32), np.full(rows, context, np.int32)
    tokens = np.arange(rows, dtype=np.int32)
    return BatchArrays(tokens, tokens, starts(counts), starts(ends), pages.reshape(-1), ends - 1, pages[:, -1])


def answer(stream: socket.socket) -> None:
    """The other process: decodes every message."""
    channel = Channel(stream)
    try:
        while True:
            message = channel.receive_from_rank0()
            assert isinstance(message, Forward)
            forward_arrays(message)
            stream.sendall(b".")
    except EOFError:
        os._exit(0)


def main() -> None:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        answer(theirs)
    theirs.close()
    channel = Channel(ours)
    print("a decode step's message: rows x context, bytes, median time of encoding, of the round trip")
    for rows, context in STEPS:
        pages = np.random.default_rng(0).permutation(rows * context).astype(np.int32).reshape(rows, -1)
        arrays, encoding, trips, frame = decode_step(pages), [], [], b""
        for _ in range(ROUNDS):
            began = time.perf_counter()
            frame = channel.encode(forward_message(arrays, (), [rows]))
            encoded = time.perf_counter()
            channel.send_frame(frame)
            ours.recv(1)
            encoding.append(encoded - began)
            trips.append(time.perf_counter() - began)
        times = (f"{statistics.median(values) * 1e6:,.0f} us" for values in (encoding, trips))
        print(f"{rows:>3} x {context:<5} {len(frame):>9,} bytes  ", *times)


if __name__ == "__main__":
    main()
