"""A worker process: compiles one job after another for one vocabulary, over a socket to the pool.

It may be killed at any moment, and ends when the socket is closed, when a job exceeds its time limit, or when memory
runs out inside a library. It is a fork of the template process (worker_template.py), which has loaded everything.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from pathlib import Path
from time import process_time

import msgspec

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
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.regex.forked_build import build_byte_dfa_in_fork
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
