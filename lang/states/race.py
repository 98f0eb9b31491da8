"""`race(forks)`: the first branches to finish win; the others are aborted at once and free their cache pages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from plait.lang.core.waiting import finish, value_of
from plait.lang.states.async_state import AsyncStateGroup
from plait.lang.states.fork_group import ForkGroup
from plait.lang.states.state import ProgramStateGroup
from plait.runtime.errors import InputError
from plait.runtime.transport.notifier import LoopNotifier, wait_for_event

if TYPE_CHECKING:
    from plait.runtime.client.call import Call

G = TypeVar("G", bound=ForkGroup[Any])


@overload
def race(forks: ProgramStateGroup, first: int = 1) -> ProgramStateGroup: ...
@overload
def race(forks: AsyncStateGroup, first: int = 1) -> Coroutine[Any, Any, AsyncStateGroup]: ...
def race(
    forks: ProgramStateGroup | AsyncStateGroup, first: int = 1
) -> ProgramStateGroup | Coroutine[Any, Any, AsyncStateGroup]:
    """Waits until all calls of `first` branches have ended, and ends the other branches. Returns the winners as a
    group, in the order in which they finished.

    A branch with a failed call cannot win. Raises the ProgramError of such a branch if too few are left. In an async
    program: `await race(forks)`.

    >>> forks = s.fork(4)                                               # doctest: +SKIP
    >>> forks += gen("proof")                                           # doctest: +SKIP
    >>> race(forks, first=1).join(); s["proof"]                         # doctest: +SKIP
    ['...']
    """
    if not isinstance(forks, ProgramStateGroup | AsyncStateGroup):
        raise InputError(f"race takes the branches of one fork, not {type(forks).__name__}")
    if isinstance(first, bool) or not isinstance(first, int) or not 1 <= first <= len(forks):
        raise InputError(f"first must be from 1 to the {len(forks)} branches of the race, not {first!r:.80}")
    if isinstance(forks, AsyncStateGroup):
        return _race_async(forks, first)
    changed = threading.Event()
    return finish(_race(forks, first, changed, changed.set, changed.wait))


async def _race_async(forks: AsyncStateGroup, first: int) -> AsyncStateGroup:
    changed, notifier = asyncio.Event(), LoopNotifier.for_running_loop()
    return await _race(forks, first, changed, lambda: notifier.notify(changed), partial(wait_for_event, changed))


async def _race(
    forks: G,
    first: int,
    changed: threading.Event | asyncio.Event,
    notify: Callable[[], None],
    wait: Callable[[float | None], Any],
) -> G:
    """Runs a race to its end. `notify` sets `changed`, from any thread; `wait(seconds)` tells whether it was set."""
    traced: G | None = forks.src_state._branch.trace_race(forks, first)
    if traced is not None:
        return traced
    race_state = _RaceState(forks, first)
    calls = race_state.open_calls()
    for call in calls:
        call.add_listener(notify)
    try:
        while not race_state.is_over():
            if not await value_of(wait(race_state.seconds_to_deadline())):
                race_state.expire_overdue()
            changed.clear()
    finally:
        for call in calls:
            call.remove_listener(notify)
    winners = race_state.end_losers()
    if not winners:
        await value_of(forks.states[race_state.failed[0]].sync())  # raises its error
    return type(forks)([forks.states[i] for i in winners], forks.src_state, forks)


class _RaceState:
    """The branches of one race, and which of them have finished or failed, in order."""

    def __init__(self, forks: ForkGroup[Any], first: int) -> None:
        self._forks = forks
        self._first = first
        self._call_segments = {i: state._branch.awaited_call_segments() for i, state in enumerate(forks.states)}
        self._won: list[int] = []
        self.failed: list[int] = []

    def end_losers(self) -> list[int]:
        """Ends all branches but the winners. Returns the indices of these, or [] if there are too few; then the first
        branch that failed is left too."""
        winners = self._won[: self._first] if len(self._won) >= self._first else []
        left = winners or self.failed[:1]
        for index, state in enumerate(self._forks.states):
            if index not in left:
                state._branch.cancel("this branch lost its race")
        return winners

    def is_over(self) -> bool:
        for index, call_segments in self._call_segments.items():
            if index in self._won or index in self.failed or not all(part.call.done() for part in call_segments):
                continue
            (self.failed if any(part.failure() for part in call_segments) else self._won).append(index)
        pending = len(self._call_segments) - len(self._won) - len(self.failed)
        return len(self._won) >= self._first or len(self._won) + pending < self._first

    def open_calls(self) -> list[Call]:
        return [
            part.call
            for call_segments in self._call_segments.values()
            for part in call_segments
            if not part.call.done()
        ]

    def seconds_to_deadline(self) -> float | None:
        deadlines = [call.deadline for call in self.open_calls() if call.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def expire_overdue(self) -> None:
        for call in self.open_calls():
            if call.deadline is not None and call.deadline <= time.monotonic():
                call.expire()
