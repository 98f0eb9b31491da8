"""The clock of simulations in which the real scheduler runs, and what their model runners have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.runtime.arrays import Float32Array

VOCAB = 4096


@dataclass
class Clock:
    """The simulated time in seconds, which the scheduler reads in place of `time.monotonic`."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


class OneTokenModel:
    """Gives every token the same logits. A simulation adds `forward`, which advances its clock."""

    def argmax_tokens(self, hidden: Float32Array) -> tuple[list[float], list[int]]:
        return [1.0] * len(hidden), [1] * len(hidden)

    def logits(self, hidden: Float32Array, allowed_ids: Any) -> Float32Array:
        logits = np.zeros((len(hidden), VOCAB), np.float32)
        logits[:, 1] = 1.0
        return logits
