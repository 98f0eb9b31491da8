"""The traceback of a user's program: the frames of the user's own files, not those of plait or of how it started.

Knows: tracebacks and plait's folders. Must not know: what failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import plait


def print_traceback(error: BaseException) -> None:
    """Prints `error` on stderr. With PLAIT_TRACEBACK=1 in the environment every frame of every cause is kept.

    A plait error is one traceback, from the caller into the program's body, and its cause is one line.
    """
    whole = traceback.TracebackException.from_exception(error)
    if os.environ.get("PLAIT_TRACEBACK") == "1":
        print("".join(whole.format()), end="", file=sys.stderr)
        return
    chain = list(_chain(whole))
    for each in chain:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if _is_users(frame.filename)])
    if not isinstance(error, plait.PlaitError):
        print("".join(whole.format()), end="", file=sys.stderr)
        return
    print("Traceback (most recent call last):", file=sys.stderr)
    frames = {(frame.filename, frame.lineno, frame.name): frame for each in chain for frame in each.stack}
    print("".join(traceback.StackSummary.from_list(frames.values()).format()), end="", file=sys.stderr)
    print("".join(whole.format_exception_only()), end="", file=sys.stderr)
    if error.__cause__ is not None:
        said = "".join(traceback.format_exception_only(error.__cause__)).strip().splitlines()
        print(f"caused by {said[-1]}", file=sys.stderr)


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_users(filename: str) -> bool:
    return not filename.startswith("<frozen ") and not any(map(Path(filename).is_relative_to, _folders()))


def _folders() -> list[Path]:
    names = ("plait", "plait.lang", "plait.runtime", "plait.constrained", "plait.kernels")
    return [Path(spec.origin).parent for spec in map(find_spec, names) if spec is not None and spec.origin]
