"""Prints the traceback of a user's program without the frames of plait itself."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import plait


def print_traceback(error: BaseException) -> None:
    """Prints `error` on stderr. PLAIT_TRACEBACK=1 in the environment keeps all frames of all causes.

    A plait error is printed as one traceback, from the caller into the program's body, with its cause as one line.
    """
    full = traceback.TracebackException.from_exception(error)
    if os.environ.get("PLAIT_TRACEBACK") == "1":
        print("".join(full.format()), end="", file=sys.stderr)
        return
    chain = list(_chain(full))
    for link in chain:
        link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if _is_user_file(frame.filename)])
    if not isinstance(error, plait.PlaitError):
        print("".join(full.format()), end="", file=sys.stderr)
        return
    print("Traceback (most recent call last):", file=sys.stderr)
    frames = {(frame.filename, frame.lineno, frame.name): frame for link in chain for frame in link.stack}
    print("".join(traceback.StackSummary.from_list(frames.values()).format()), end="", file=sys.stderr)
    print("".join(full.format_exception_only()), end="", file=sys.stderr)
    if error.__cause__ is not None:
        cause = "".join(traceback.format_exception_only(error.__cause__)).strip().splitlines()
        print(f"caused by {cause[-1]}", file=sys.stderr)


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """Yields an error and its causes, from the last raised to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_user_file(filename: str) -> bool:
    return not filename.startswith("<frozen ") and not any(map(Path(filename).is_relative_to, _plait_folders()))


def _plait_folders() -> list[Path]:
    names = ("plait", "plait.lang", "plait.runtime", "plait.constrained", "plait.kernels")
    return [Path(spec.origin).parent for spec in map(find_spec, names) if spec is not None and spec.origin]
