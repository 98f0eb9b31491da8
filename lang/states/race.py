"""`race(forks)`: the first branches to finish win; the others are aborted at once and free their cache pages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
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
    traced: Any = forks.src_state._branch.trace_race(forks, first)
    if traced is not None:
        return traced if isinstance(forks, ProgramStateGroup) else _traced_async(traced)
    race_state = _RaceState(forks, first)
    if isinstance(forks, ProgramStateGroup):
        changed = threading.Event()
        return finish(_race(forks, race_state, changed, changed.set, changed.wait))
    return _race_async(forks, race_state)


async def _traced_async(winners: AsyncStateGroup) -> AsyncStateGroup:
    return winners


async def _race_async(forks: AsyncStateGroup, race_state: _RaceState) -> AsyncStateGroup:
    changed, notifier = asyncio.Event(), LoopNotifier.for_running_loop()
    return await _race(forks, race_state, changed, lambda: notifier.notify(changed), partial(wait_for_event, changed))


async def _race(
    forks: G,
    race_state: _RaceState,
    changed: threading.Event | asyncio.Event,
    notify: Callable[[], None],
    wait: Callable[[float | None], Any],
) -> G:
    """Runs a race to its end. `notify` sets `changed`, from any thread; `wait(seconds)` tells whether it was set."""
    with race_state.listening(notify):
        while not race_state.is_over():
            if not await value_of(wait(race_state.seconds_to_deadline())):
                race_state.expire_overdue()
            changed.clear()
    winners = race_state.end_losers()
    if winners is None:
        await value_of(race_state.first_failed_branch().sync())
    return type(forks)([forks.states[i] for i in winners or ()], forks.src_state, forks)


class _RaceState:
    """The branches of one race, and which of them have finished or failed, in order."""

    def __init__(self, forks: ForkGroup[Any], first: int) -> None:
        self._forks = forks
        self._first = first
        self._call_segments = {i: state._branch.awaited_call_segments() for i, state in enumerate(forks.states)}
        self._won: list[int] = []
        self._failed: list[int] = []

    def end_losers(self) -> list[int] | None:
        """Ends all branches but the winners. Returns the indices of the winners, or None if there are too few."""
        enough = len(self._won) >= self._first
        winners = self._won[: self._first] if enough else []
        for index, state in enumerate(self._forks.states):
            if index not in winners and (enough or index not in self._failed[:1]):
                state._branch.cancel("this branch lost its race")
        return winners if enough else None

    def first_failed_branch(self) -> Any:
        return self._forks.states[self._failed[0]]

    def is_over(self) -> bool:
        for index, call_segments in self._call_segments.items():
            if index in self._won or index in self._failed or not all(part.call.done() for part in call_segments):
                continue
            (self._failed if any(part.failure() for part in call_segments) else self._won).append(index)
        pending = len(self._call_segments) - len(self._won) - len(self._failed)
        return len(self._won) >= self._first or len(self._won) + pending < self._first

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        calls = self._open_calls()
        for call in calls:
            call.add_listener(listener)
        try:
            yield
        finally:
            for call in calls:
                call.remove_listener(listener)

    def _open_calls(self) -> list[Call]:
        return [
            part.call
            for call_segments in self._call_segments.values()
            for part in call_segments
            if not part.call.done()
        ]

    def seconds_to_deadline(self) -> float | None:
        deadlines = [call.deadline for call in self._open_calls() if call.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def expire_overdue(self) -> None:
        for call in self._open_calls():
            if call.deadline is not None and call.deadline <= time.monotonic():
                call.expire()
