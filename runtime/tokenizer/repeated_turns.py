"""A shorter conversation in whose place a chat template writes the same text around the next turn.

Rendering all earlier turns for each new one is quadratic. Templates look at the first turns, at the last ones and at
the parity of a turn, so that a long conversation without whole periods of its middle gets the same text. That is not so
for every template: the caller compares both.
"""

from __future__ import annotations

from typing import TypeVar

R = TypeVar("R")

FIRST_TURNS = 8  # that are kept
PERIOD = 12  # the number of turns that are left out is a multiple of it, as is every turn's place modulo 2, 3, 4 and 6
MAX_LENGTH = FIRST_TURNS + 2 * PERIOD - 1  # of what is returned


def without_middle(turns: tuple[R, ...]) -> tuple[R, ...]:
    """Returns the turns without as many periods of their middle as leave PERIOD last ones.

    >>> without_middle(tuple(range(46)))[6:11]
    (6, 7, 20, 21, 22)
    """
    stop = FIRST_TURNS + max(0, len(turns) - FIRST_TURNS - PERIOD) // PERIOD * PERIOD
    return turns[:FIRST_TURNS] + turns[stop:]


def is_checked(num_turns: int) -> bool:
    """Whether the whole conversation is rendered at this length in any case: a power of two."""
    return num_turns & (num_turns - 1) == 0
