"""Builds the byte automaton of a pattern in a forked process with a time limit.

outlines-core cannot be interrupted and takes minutes and gigabytes for some short patterns; a process can be killed at
any moment, which frees its memory.
"""

from __future__ import annotations

import os
import select
import signal
from time import monotonic

import numpy as np

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.regex_compiler import ByteDfa, build_byte_dfa

BUILD_LIMIT_S = 0.3
_CHUNK_BYTES = 1 << 20
_ROW_LENGTH = 256
_HEADER = 8


def build_byte_dfa_in_fork(pattern: str, limit_s: float = BUILD_LIMIT_S) -> ByteDfa:
    """Runs `build_byte_dfa` in a fork. Raises DfaTooLarge if it takes more than `limit_s` seconds or ends its process.

    The caller must be a process with one thread, since a fork copies no other thread.

    >>> states, start, accepting = build_byte_dfa_in_fork("ab|a")                 # doctest: +SKIP
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _build_in_child(pattern, writing, limit_s)
    os.close(writing)
    try:
        answer = _read(reading, monotonic() + limit_s)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    num_states = int.from_bytes(answer[:_HEADER], "little")
    if not answer or len(answer) != _HEADER + num_states * (4 * _ROW_LENGTH + 1):
        raise DfaTooLarge
    states = np.frombuffer(answer, np.int32, num_states * _ROW_LENGTH, _HEADER).reshape(-1, _ROW_LENGTH)
    return states, 0, np.frombuffer(answer, np.bool_, num_states, _HEADER + states.nbytes)


def _build_in_child(pattern: str, writing: int, limit_s: float) -> None:
    """In the fork: writes the number of states, their rows and `accepting` (nothing on error), then exits."""
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s + 0.2)  # in case the parent no longer exists
        states, _, accepting = build_byte_dfa(pattern)
        with os.fdopen(writing, "wb") as out:
            out.write(len(states).to_bytes(_HEADER, "little") + states.tobytes() + accepting.tobytes())
    finally:
        os._exit(0)


def _read(reading: int, until: float) -> bytes:
    """Returns the bytes received until the end of the pipe or the time `until`."""
    received = bytearray()
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while (remaining_s := until - monotonic()) > 0:
        if poller.poll(1000 * remaining_s):
            chunk = os.read(reading, _CHUNK_BYTES)
            if not chunk:
                break
            received += chunk
    return bytes(received)
