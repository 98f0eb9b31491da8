"""Sends the log of the server's process to standard error through a queue and a thread: nothing waits for it."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from plait.runtime.log_writer import LogWriter

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

log = logging.getLogger("plait.server")


class QueueingHandler(logging.Handler):
    """Formats log records and hands them to a LogWriter."""

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.writer = LogWriter(fd, self._dropped_line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self.format(record) + "\n")
        except Exception:  # a record with wrong arguments
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Logs what is wrong with a record; the superclass would write to standard error and wait."""
        self.writer.put(traceback.format_exc())

    def flush(self) -> None:
        """Waits until the lines are written, but not for a reader that takes none. Called at exit."""
        self.writer.flush()

    def _dropped_line(self, num_dropped: int) -> str:
        text = "%d log lines were dropped, because nobody read the log"
        record = log.makeRecord(log.name, logging.WARNING, "", 0, text, (num_dropped,), None)
        return self.format(record) + "\n"


def log_to_standard_error(formatter: logging.Formatter) -> None:
    """Writes all log records from INFO up to standard error; also warnings and errors that no code catches."""
    handler: logging.Handler = logging.NullHandler()
    if sys.stderr is not None:
        handler = QueueingHandler(sys.stderr.fileno(), formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread_error


def num_dropped_lines() -> int:
    """How many lines of this process's log were dropped."""
    handlers = logging.getLogger().handlers
    return sum(handler.writer.num_dropped for handler in handlers if isinstance(handler, QueueingHandler))


def _log_unraisable(error: UnraisableHookArgs) -> None:
    log.error("%s %r", error.err_msg or "exception ignored in", error.object, exc_info=error.exc_value)


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    name = error.thread.name if error.thread is not None else "a thread"
    log.error("%s ended with an error", name, exc_info=error.exc_value)
