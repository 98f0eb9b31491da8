"""How the output of a generation ended."""

from __future__ import annotations

from typing import NamedTuple

from plait.runtime.messages import FinishReason


class FinishInfo(NamedTuple):
    """How an output ended: the reason, and the stop string or stop token that matched."""

    reason: FinishReason
    matched: str | int | None = None
