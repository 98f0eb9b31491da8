"""The share of generated cases that a run takes: PLAIT_EXAMPLE_SHARE, a quarter if it is not set, 1 for all.

Property tests take the same examples in every run, so that a change is judged by the change. With PLAIT_RANDOM_EXAMPLES
set they take new ones, as many as are written, to search for faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

ARE_REPEATABLE = not os.environ.get("PLAIT_RANDOM_EXAMPLES")
EXAMPLE_SHARE = float(os.environ.get("PLAIT_EXAMPLE_SHARE") or (0.25 if ARE_REPEATABLE else 1))


def share_of(number: int, least: int = 1) -> int:
    """The share of `number` cases, `least` if it is smaller, and no more than there are."""
    return min(number, max(least, round(EXAMPLE_SHARE * number)))


def sample_of(cases: Sequence[Case], least: int = 1) -> list[Case]:
    """The share of `cases`, at equal distances."""
    count = share_of(len(cases), least)
    return [cases[place * len(cases) // count] for place in range(count)]
