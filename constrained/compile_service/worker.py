"""A worker process: compiles one job after another for one vocabulary, over a socket to the pool.

It may be killed at any moment, and ends when the socket is closed, when a job exceeds its time limit, or when memory
runs out inside a library. It is a fork of the template process (worker_template.py), which has loaded everything.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
from pathlib import Path
from time import monotonic, process_time

import msgspec
import numpy as np

from plait.constrained.compile_service.worker_messages import (
    MAX_FRAME_BYTES,
    CompileJob,
    CompileRefused,
    CompileResult,
    TokenDfaArrays,
    WorkerReady,
    encode,
    pack_dfa,
)
from plait.constrained.compiler import compile_spec
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.regex.regex_compiler import ByteDfa, build_byte_dfa
from plait.constrained.specs import GrammarError, Spec
from plait.constrained.tokens.vocabulary import Vocabulary
from plait.host.frames import receive_frame

_UNLIMITED_STACK = 2 << 20  # glibc's stack of a thread where RLIMIT_STACK sets none


def run_worker(connection: socket.socket, vocabulary: Vocabulary, memory_bytes: int) -> None:
    """Sends WorkerReady, then a CompileResult for each CompileJob, until the connection is closed."""
    os.setpgid(0, 0)  # so that the process of an automaton's build can be killed with this one
    _limit_memory(memory_bytes)
    _limit_stack()
    decoder = msgspec.msgpack.Decoder(CompileJob)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.sendall(encode(WorkerReady(os.getpid())))
        while True:
            job = decoder.decode(receive_frame(connection, MAX_FRAME_BYTES))
            connection.sendall(encode(_run_job(job, vocabulary)))


def _run_job(job: CompileJob, vocabulary: Vocabulary) -> CompileResult:
    if job.is_lowered:
        lower_priority()
    # The signal's default action ends the process even while a library holds the interpreter's lock.
    signal.setitimer(signal.ITIMER_REAL, job.limit_s)
    start = process_time()
    try:
        return CompileResult(_compile(job.spec, vocabulary), process_time() - start)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _compile(spec: Spec, vocabulary: Vocabulary) -> TokenDfaArrays | LlguidanceSource | CompileRefused:
    try:
        form = compile_spec(spec, vocabulary, build_byte_dfa_in_fork)
        return form if isinstance(form, LlguidanceSource) else pack_dfa(form)
    except GrammarError as error:
        return CompileRefused(error.reason, error.where)
    except MemoryError:
        return CompileRefused("needs too much memory to compile", None)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # also a library's panic, which is no Exception; the other jobs go on
        return CompileRefused(f"the compiler failed on this constraint ({type(error).__name__})", None)


def lower_priority() -> None:
    """Gives this process, and those that it forks, the lowest priority for good: without a privilege it never rises.

    Linux stops a process of its idle class at once where another one wants the processor, and so does not let it finish
    a time slice of some milliseconds, as it does with a process of niceness 19.
    """
    os.nice(19)  # the system takes the highest that it has
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or forbidden by a sandbox
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _limit_memory(beyond_bytes: int) -> None:
    """Limits the address space to what is in use now plus `beyond_bytes`, where the system supports it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use = int(statm.read_text().split()[0]) * resource.getpagesize()
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (in_use + beyond_bytes, resource.RLIM_INFINITY))


def _limit_stack() -> None:
    """Halves the stack. The caller, perhaps in a thread, compiles the grammar again: what it could not, ends here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    of_thread = _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (of_thread // 2, hard))


# -- a build with a time limit ---------------------------------------------------------------------
# outlines-core cannot be interrupted and takes minutes and gigabytes for some short patterns; a process can be killed
# at any moment, which frees its memory.

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
