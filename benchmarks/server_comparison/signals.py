"""A benchmark that is told to end ends the servers it started: by default SIGTERM takes it where it stands.

Knows: signals. Must not know: processes, what a benchmark does.
"""

from __future__ import annotations

import signal
from types import FrameType


def unwind_on_signal() -> None:
    """From now on SIGTERM and SIGINT raise SystemExit in the main thread, so that every `finally` runs.

    What they interrupt is not interrupted a second time. Who started this with a signal ignored is left so.
    """
    told = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN]

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in told:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in told:
        signal.signal(each, unwind)
