"""A step's rows in strips: what a thread takes from one attention to the next within its own core's caches.

Between two attentions a row meets no other row. So with many rows each thread goes through all phases of a strip of
them, and what a phase leaves is in the core's cache that reads it next; each strip has counters of its own, by which
threads that are done with theirs help with the others'.

Knows: rows and counters. Must not know: what a phase computes, how many strips there are and why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from plait.kernels.cpu_amx import ROWS
from plait.kernels.cpu_parts import Rounded, Rows, Team
from plait.kernels.cpu_team import STRIDE

PAIR = 2 * ROWS  # rows that are multiplied at once


class State(NamedTuple):
    """What a step works on: T tokens, C channels, F of the MLP."""

    residual: Any  # [T, C] float32
    block_out: Any  # [T, C]
    normed: Any  # [T, C], the result
    qkv: Any  # [T, (H + 2 G) D]
    hidden: Rounded  # [T, C]
    attended: Rounded  # [T, H D]
    inner: Rounded  # [T, F]


@numba.njit  # type: ignore[untyped-decorator]
def strip_rows(strip: int, strips: int, rows: int) -> Any:
    """The first row of a strip and the one behind its last; all but the last strip are whole pairs of registers."""
    pairs = (rows + PAIR - 1) // PAIR
    return PAIR * (strip * pairs // strips), min(rows, PAIR * ((strip + 1) * pairs // strips))


@numba.njit  # type: ignore[untyped-decorator]
def strip_team(team: Team, strip: int, phases: int) -> Team:
    """The team with the counters of a strip, the first strip's being the team's."""
    return Team(team.me, team.num_threads, team.counters + 16 * STRIDE * phases * strip, team.scratch)


@numba.njit  # type: ignore[untyped-decorator]
def strip_state(state: State, begin: int, end: int) -> State:
    """The state of rows begin .. end, `begin` a multiple of 16."""
    return State(
        state.residual[begin:end],
        state.block_out[begin:end],
        state.normed[begin:end],
        state.qkv[begin:end],
        _strip_rounded(state.hidden, begin, end),
        _strip_rounded(state.attended, begin, end),
        _strip_rounded(state.inner, begin, end),
    )


@numba.njit  # type: ignore[untyped-decorator]
def _strip_rounded(x: Rounded, begin: int, end: int) -> Rounded:
    return Rounded(x.numbers[begin:end], x.scales[begin:end], x.sums[begin:end], x.wide[begin:end])


@numba.njit  # type: ignore[untyped-decorator]
def strip_places(rows: Rows, begin: int, end: int) -> Rows:
    """Positions and slots of rows begin .. end; what attention reads stays whole."""
    return Rows(
        rows.positions[begin:end],
        rows.q_starts,
        rows.kv_starts,
        rows.first_pages,
        rows.pages,
        rows.writes[begin:end],
        rows.tiles,
        rows.segments,
        rows.pieces,
        rows.num_tiles,
        rows.page_shift,
    )
