"""One worker process as seen by its parent: bytes to write, frames received, a deadline. No method blocks."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import monotonic

import msgspec

from plait.constrained.compile_service.messages import FromWorker, ToWorker, encode_frame, pop_frame

START_LIMIT_S = 20.0
WALL_TIME_FACTOR = 4  # wall-clock limit of a job as a multiple of its CPU limit
_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", None)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_decoder = msgspec.msgpack.Decoder(FromWorker)


class WorkerProcess:
    """A started worker; `deadline` is when it must have answered (monotonic seconds), None while it is idle.

    >>> worker = WorkerProcess(WorkerInit([b"", b"a"], [0], 2 << 30))      # doctest: +SKIP
    >>> worker.receive()                                                  # doctest: +SKIP
    [WorkerReady()]
    """

    def __init__(self, init: ToWorker) -> None:
        command = [sys.executable, "-P", "-m", "plait.constrained.compile_service.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            bufsize=0,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,  # not a new session: Linux shares CPU time between sessions whatever their niceness
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)
            if _SET_PIPE_SIZE is not None:
                with contextlib.suppress(OSError):  # the pipe keeps its default size and is only slower
                    fcntl.fcntl(stream.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.is_ready = False
        self.ready_bytes = 0  # resident memory when it became ready
        self.is_dead = False
        self.deadline: float | None = monotonic() + START_LIMIT_S
        self._hard_deadline = self.deadline  # the deadline is never moved beyond this
        self._cpu_limit_s = 0.0
        self.send(init)

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Returns the resident memory of the process in bytes; 0 if the system does not report it."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        except (OSError, IndexError):
            return 0

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds that the process has used; infinity if the system does not report them."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            return math.inf

    def begin(self, limit_s: float) -> None:
        """Starts the deadline of a job that may use `limit_s` CPU seconds."""
        now = monotonic()
        self.deadline, self._hard_deadline = now + limit_s, now + WALL_TIME_FACTOR * limit_s
        used = self.cpu_seconds()
        self._cpu_limit_s = used + limit_s if math.isfinite(used) else -math.inf

    def is_past_deadline(self) -> bool:
        """Returns whether the deadline has passed. The deadline moves if other processes kept the job from a CPU."""
        now = monotonic()
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline = min(self._hard_deadline, now + self._cpu_limit_s - self.cpu_seconds())
        return now >= self.deadline

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for space in the pipe; call `flush` again soon."""
        return bool(self._outgoing) and not self.is_dead

    def fileno(self) -> int:
        """Readable when there is something to `receive`."""
        return self._stdout.fileno()

    def send(self, message: ToWorker) -> None:
        """Queues a message and writes as much as the pipe takes."""
        self._outgoing += encode_frame(message)
        self.flush()

    def flush(self) -> None:
        """Writes as much as the pipe takes; a broken pipe sets `is_dead`."""
        try:
            while self._outgoing and not self.is_dead:
                del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.is_dead = True

    def receive(self) -> list[FromWorker]:
        """Returns the messages that are complete. End of file or an invalid frame sets `is_dead`."""
        messages: list[FromWorker] = []
        try:
            while not self.is_dead:
                received = os.read(self._stdout.fileno(), _PIPE_BYTES)
                self._incoming += received
                self.is_dead = not received
        except BlockingIOError:
            pass  # no more data yet
        except OSError:
            self.is_dead = True
        try:
            while (body := pop_frame(self._incoming)) is not None:
                messages.append(_decoder.decode(body))
        except (ValueError, msgspec.DecodeError):
            self.is_dead = True
        return messages

    def kill(self) -> None:
        """Kills the process and closes the pipes. `has_exited` then says when it is reaped."""
        self.is_dead = True
        self._process.kill()
        self._stdin.close()
        self._stdout.close()

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Returns whether the process has ended and was reaped; waits up to `wait_s` seconds."""
        try:
            self._process.wait(wait_s) if wait_s else self._process.poll()
        except subprocess.TimeoutExpired:
            return False
        return self._process.returncode is not None
