"""What a starting runtime shows: a progress bar on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # tqdm is imported when a bar is shown
    from tqdm import tqdm

Progress: TypeAlias = bool | Callable[[str], object] | None  # the argument of Runtime
BAR_DELAY_S = 0.5  # a bar appears if loading takes longer
LINES_DELAY_S = 5.0  # lines appear if loading takes longer; at once if kernels are compiled
LINE_INTERVAL_S = 10.0
COMPILING = "compiling kernels"  # begins the text of the activity that makes the first start slow


class StartupDisplay:
    """Shows nothing, which is what `progress=False` asks for."""

    def show(self, fraction: float, doing: str) -> None:
        """Shows the current activity and which part of it is done, 0 to 1."""

    def close(self) -> None:
        """Ends the display."""


def startup_display(progress: Progress, started: float) -> StartupDisplay:
    """Returns the display for `Runtime(progress=...)`. `started`: when the start began, in monotonic seconds."""
    if callable(progress):
        return PlainLines(started, progress)
    if progress is None:
        return ProgressBar(started) if sys.stderr is not None and sys.stderr.isatty() else PlainLines(started)
    return ProgressBar(started) if progress else StartupDisplay()


class ProgressBar(StartupDisplay):
    """A bar on standard error, which is removed at the end."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._bar: tqdm[Any] | None = None

    def show(self, fraction: float, doing: str) -> None:
        if self._bar is None:
            if not is_compiling(doing) and time.monotonic() - self._started <= BAR_DELAY_S:
                return
            self._bar = _tqdm_bar()
        self._bar.n = round(100 * fraction)
        self._bar.set_description_str(doing, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class PlainLines(StartupDisplay):
    """Lines on standard error, or for `write`: one for each slow activity, and one each ten seconds while it lasts."""

    def __init__(self, started: float, write: Callable[[str], object] | None = None) -> None:
        self._started = started
        self._write = write or _write_to_standard_error
        self._next_line_at = started + LINES_DELAY_S
        self._is_compiling = False

    def show(self, fraction: float, doing: str) -> None:
        now = time.monotonic()
        is_new = is_compiling(doing) != self._is_compiling
        if not is_new and now < self._next_line_at:
            return
        self._is_compiling = is_compiling(doing)
        self._next_line_at = now + LINE_INTERVAL_S
        self._write(f"{doing}, after {now - self._started:.0f} s [{fraction:.0%}]")


def _write_to_standard_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed, or a pipe that nobody reads
        print(f"plait: {text}", file=sys.stderr, flush=True)


def is_compiling(doing: str) -> bool:
    """Whether the activity compiles kernels."""
    return doing.startswith(COMPILING)


def _tqdm_bar() -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(
        total=100,
        bar_format="{desc} {bar} {percentage:3.0f}%",
        leave=False,
        file=sys.stderr,
        ncols=shutil.get_terminal_size().columns,  # tqdm alone shows nothing on a terminal of unknown width
    )
