"""The template process: loads a vocabulary and the libraries once, then forks a worker for each request of the pool.

`python -m plait.constrained.compile_service.worker_template`, with a socket as standard input. A fork takes
milliseconds and shares the template's memory; a new process takes half a second. The template must keep to one thread,
since a fork copies no other thread. When its socket is closed, it kills its workers, waits for them and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket

import msgspec

from plait.constrained.compile_service.worker import run_worker
from plait.constrained.compile_service.worker_messages import (
    MAX_FRAME_BYTES,
    WorkerInit,
    WorkerReady,
    encode,
    receive_control,
)
from plait.constrained.guidance.inner_matcher import warm_up
from plait.constrained.guidance.unique_items import item_tokens
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.tokens.token_trie import SINGLE_BYTES
from plait.constrained.tokens.vocabulary import Vocabulary
from plait.host.frames import receive_frame

NICENESS = 11  # beside a thread at 0: 8% of a core


def serve(control: socket.socket, vocabulary: Vocabulary, memory_bytes: int) -> None:
    """Forks and reaps workers as requested until the socket is closed, then ends those that are left."""
    workers, killed = set[int](), set[int]()
    try:
        while (request := receive_control(control)) is not None:
            if request.pid in workers:
                killed.add(request.pid)
            for pid in [pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0]]:  # a lowered one takes long to end
                killed.discard(pid)
                workers.discard(pid)
            if request.connection is not None:
                pid = _fork_worker(control, request.connection, vocabulary, memory_bytes)
                request.connection.close()
                workers.add(pid)
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork_worker(control: socket.socket, connection: socket.socket, vocabulary: Vocabulary, memory_bytes: int) -> int:
    """Returns the process id of a new worker, which never returns from here."""
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            run_worker(connection, vocabulary, memory_bytes)
        finally:
            os._exit(0)
    return pid


def _load(init: WorkerInit) -> Vocabulary:
    """Builds the vocabulary, its trie and llguidance's tokenizer, and loads the libraries."""

    def encode(text: str) -> list[int]:  # it only serves to check that a grammar compiles
        return vocabulary.spell_bytes(text.encode())

    vocabulary = Vocabulary(tuple(init.token_bytes), tuple(init.eos_ids), encode, init.control_texts)
    len(vocabulary.trie)
    vocabulary.token_tries.get(SINGLE_BYTES)
    to_plain_pattern(r"\w|\d|\s")  # computes these classes
    len(vocabulary.ids_by_bytes)
    item_tokens(vocabulary)
    warm_up(vocabulary, masks_quickly=False)
    gc.freeze()  # the template lives as long as the runtime: collections of the workers skip what it has loaded
    return vocabulary


def _return_freed_memory() -> None:
    """Returns freed memory to the system: glibc alone keeps what lies below a live allocation, here 6 MB."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # C libraries without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Serves on standard input, after redirecting the standard streams so that no library can print."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.nice(NICENESS)
    with socket.socket(fileno=os.dup(0)) as control:
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        try:
            init = msgspec.msgpack.decode(receive_frame(control, MAX_FRAME_BYTES), type=WorkerInit)
        except EOFError:
            return
        vocabulary = _load(init)
        memory_bytes = init.memory_bytes
        del init
        _return_freed_memory()
        os.dup2(devnull, 2)  # hides what a library prints when it aborts
        control.sendall(encode(WorkerReady(os.getpid())))
        serve(control, vocabulary, memory_bytes)


if __name__ == "__main__":
    main()
