"""Lets a benchmark end the servers it started when it is terminated: by default SIGTERM skips every `finally`."""

from __future__ import annotations

import signal
from types import FrameType


def unwind_on_signal() -> None:
    """Makes SIGTERM and SIGINT raise SystemExit in the main thread, so that every `finally` runs.

    Only the first signal does; later ones are ignored. A signal that was already ignored stays ignored.
    """
    handled = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]

    def unwind(received: int, frame: FrameType | None) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + received)

    for number in handled:
        signal.signal(number, unwind)
