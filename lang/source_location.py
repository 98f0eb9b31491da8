"""`SourceLocation`: a line in the user's own code, for error messages. Skips frames of plait and of libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

_LIBRARIES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


@dataclass(frozen=True)
class SourceLocation:
    """A line of a file.

    >>> str(SourceLocation("agent.py", 12))
    'agent.py:12'
    """

    filename: str
    lineno: int

    def __str__(self) -> str:
        return f"{_short(self.filename)}:{self.lineno}"


def caller_location() -> SourceLocation | None:
    """Returns the line of the user's code that is running in this thread, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_plait_frame(frame) and not _is_library(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def error_location(error: BaseException) -> SourceLocation | None:
    """Returns the innermost line of the user's code in the traceback of `error`, or None."""
    frames = list(_frames(error))
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return (own or frames)[-1] if frames else None


def function_location(code: CodeType | None) -> SourceLocation | None:
    """Returns the first line of a function."""
    return None if code is None else SourceLocation(code.co_filename, code.co_firstlineno)


def _frames(error: BaseException) -> Iterator[SourceLocation]:
    trace = error.__traceback__
    while trace is not None:
        if not _is_plait_frame(trace.tb_frame):
            yield SourceLocation(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next


def _is_plait_frame(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "plait"


@lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    return filename.startswith(("<frozen ", *_LIBRARIES))


def _short(filename: str) -> str:
    """Returns the path relative to the working directory, if the file is inside it."""
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # another drive, or a deleted working directory
        return filename
    return filename if relative.startswith("..") or filename.startswith("<") else relative
