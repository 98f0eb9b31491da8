"""The worker process that compiles: `python -m plait.constrained.compile_service.worker`, frames on stdin and stdout.

It serves one vocabulary and one job at a time. It may be killed at any moment, and ends by itself when stdin ends, when
a job exceeds its time limit, or when memory runs out inside a library.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

import msgspec

from plait.constrained.compile_service.messages import (
    CompileJob,
    CompileRefused,
    CompileResult,
    FromWorker,
    TokenDfaArrays,
    ToWorker,
    WorkerInit,
    WorkerReady,
    encode_frame,
    pack_dfa,
)
from plait.constrained.compiler import compile_spec
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.regex.compiler import build_byte_dfa
from plait.constrained.regex.forked_build import build_byte_dfa_in_fork
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.specs import GrammarError, Spec
from plait.constrained.vocabulary import Vocabulary

NICENESS = 15


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Answers frames until stdin ends: WorkerReady to WorkerInit, and CompileResult to each CompileJob."""
    decoder = msgspec.msgpack.Decoder(ToWorker)
    vocabulary: Vocabulary | None = None
    while header := incoming.read(4):
        message = decoder.decode(incoming.read(int.from_bytes(header, "little")))
        if isinstance(message, WorkerInit):
            vocabulary = _initialize(message)
            answer: FromWorker = WorkerReady()
        elif vocabulary is not None:
            answer = _run_job(message, vocabulary)
        else:
            raise ValueError("a job came before the vocabulary")
        outgoing.write(encode_frame(answer))
        outgoing.flush()


def _initialize(init: WorkerInit) -> Vocabulary:
    """Builds the vocabulary and its trie, loads the libraries, and then sets the memory limit."""
    token_bytes = tuple(init.token_bytes)
    vocabulary = Vocabulary(token_bytes, tuple(init.eos_ids), _greedy_encoder(token_bytes))
    len(vocabulary.trie)
    build_byte_dfa(to_plain_pattern(r"\w|\d|\s").pattern)
    _limit_memory(init.memory_bytes)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # hides what a library prints when it aborts
    return vocabulary


def _run_job(job: CompileJob, vocabulary: Vocabulary) -> FromWorker:
    # The signal's default action ends the process even while a library holds the interpreter's lock.
    signal.setitimer(signal.ITIMER_REAL, job.limit_s)
    start = perf_counter()
    try:
        return CompileResult(_compile(job.spec, vocabulary), perf_counter() - start)
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


def _greedy_encoder(token_bytes: tuple[bytes, ...]) -> Callable[[str], Sequence[int]]:
    """Returns an encoder that takes the longest token first; it only serves to check that a grammar compiles."""
    ids = {token: number for number, token in enumerate(token_bytes) if token}
    longest = max(map(len, ids), default=0)

    def encode(text: str) -> Sequence[int]:
        rest, tokens = text.encode(), list[int]()
        while rest:
            length = next((n for n in range(longest, 0, -1) if rest[:n] in ids), 0)
            if length:
                tokens.append(ids[rest[:length]])
            rest = rest[length or 1 :]
        return tokens

    return encode


def _limit_memory(beyond_bytes: int) -> None:
    """Limits the address space to what is in use now plus `beyond_bytes`, where the system supports it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        in_use = int(statm.read_text().split()[0]) * resource.getpagesize()
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (in_use + beyond_bytes, resource.RLIM_INFINITY))


def main() -> None:
    """Serves on stdin and stdout, after redirecting both so that no library can print into them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.nice(NICENESS)
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    with contextlib.suppress(BrokenPipeError):
        serve(incoming, outgoing)


if __name__ == "__main__":
    main()
