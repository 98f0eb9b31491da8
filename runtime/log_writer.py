"""Writes log lines to a file descriptor in a thread, so that a log that nobody reads stops nothing.

Lines wait in a bounded queue. When it is full, further lines are dropped and counted; a line that says how many were
dropped takes their place as soon as lines are written again.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 20
MAX_WRITE_BYTES = 1 << 16
FLUSH_TIMEOUT_S = 2.0  # without any progress


def _dropped_line(num_dropped: int) -> str:
    return f"{num_dropped} log lines were dropped, because nobody read the log\n"


class LogWriter:
    """A queue of lines and the daemon thread that writes them to `fd`.

    dropped_line(n): the line that reports n dropped lines. num_dropped: how many lines were dropped so far.
    """

    def __init__(self, fd: int, dropped_line: Callable[[int], str] = _dropped_line) -> None:
        self._fd, self._dropped_line = fd, dropped_line
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_waiting_bytes = self._num_written_bytes = 0  # waiting: those that are being written too
        self._num_unreported = 0
        self.num_dropped = 0
        threading.Thread(target=self._run, name="plait-log", daemon=True).start()

    def put(self, text: str) -> None:
        """Adds one or more complete lines to the queue, or drops them if it is full. Never waits for the reader."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._count_dropped(1)
                return
            self._report_dropped()
            self._append(data)
            self._changed.notify_all()

    def flush(self) -> bool:
        """Waits until all lines are written. Returns False if none could be written for two seconds."""
        with self._changed:
            while self._num_waiting_bytes:
                before = self._num_written_bytes
                self._changed.wait_for(lambda: self._num_written_bytes != before, FLUSH_TIMEOUT_S)  # noqa: B023
                if self._num_written_bytes == before:
                    return False
        return True

    def _append(self, data: bytes) -> None:
        self._lines.append(data)
        self._num_waiting_bytes += len(data)

    def _count_dropped(self, num_lines: int) -> None:
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _report_dropped(self) -> None:
        if self._num_unreported:
            self._append(self._dropped_line(self._num_unreported).encode())
            self._num_unreported = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                data = self._take()
            is_written = self._write(data)
            with self._changed:
                self._num_waiting_bytes -= len(data)
                self._num_written_bytes += len(data)
                if not is_written:
                    self._count_dropped(data.count(b"\n"))
                elif not self._lines:
                    self._report_dropped()
                self._changed.notify_all()

    def _take(self) -> bytes:
        """Removes the first lines from the queue, as many as are written at once."""
        lines = [self._lines.popleft()]
        num_bytes = len(lines[0])
        while self._lines and num_bytes + len(self._lines[0]) <= MAX_WRITE_BYTES:
            num_bytes += len(self._lines[0])
            lines.append(self._lines.popleft())
        return b"".join(lines)

    def _write(self, data: bytes) -> bool:
        """Writes `data`, however long that takes. Returns False if it cannot be written: no reader, a full disk."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True
