"""`race(forks)`: the branches that are done first win, the others end at once and free their pages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from plait.lang.aio.state import AsyncStateGroup
from plait.lang.core.fork_group import ForkGroup
from plait.lang.core.state import ProgramStateGroup
from plait.runtime.errors import InputError
from plait.runtime.transport.notifier import LoopNotifier, wait_for_event

if TYPE_CHECKING:
    from plait.runtime.client.call import Call


@overload
def race(forks: ProgramStateGroup, first: int = 1) -> ProgramStateGroup: ...
@overload
def race(forks: AsyncStateGroup, first: int = 1) -> Coroutine[Any, Any, AsyncStateGroup]: ...
def race(
    forks: ProgramStateGroup | AsyncStateGroup, first: int = 1
) -> ProgramStateGroup | Coroutine[Any, Any, AsyncStateGroup]:
    """Waits until `first` of the branches have all their answers, ends the rest, and gives the winners as a group,
    in the order in which they were done.

    A branch whose call failed cannot win. Raises its ProgramError where too few can. In an async program:
    `await race(forks)`.

    >>> forks = s.fork(4)                                               # doctest: +SKIP
    >>> forks += gen("proof")                                           # doctest: +SKIP
    >>> race(forks, first=1).join(); s["proof"]                         # doctest: +SKIP
    ['...']
    """
    if not isinstance(forks, ProgramStateGroup | AsyncStateGroup):
        raise InputError(f"race takes the branches of one fork, not {type(forks).__name__}")
    if isinstance(first, bool) or not isinstance(first, int) or not 1 <= first <= len(forks):
        raise InputError(f"first must be from 1 to the {len(forks)} branches of the race, not {first!r:.80}")
    raced: ProgramStateGroup | None = forks._traced_race(first)
    if raced is not None:
        return raced
    race_state = _RaceState(forks, first)
    if isinstance(forks, ProgramStateGroup):
        race_state.wait()
        winners = race_state.end_losers()
        if winners is None:
            race_state.first_failed_branch().sync()
        return ProgramStateGroup([forks.states[i] for i in winners or ()], forks.src_state, forks)
    return _race_async(forks, race_state)


async def _race_async(forks: AsyncStateGroup, race_state: _RaceState) -> AsyncStateGroup:
    await race_state.wait_async()
    winners = race_state.end_losers()
    if winners is None:
        await race_state.first_failed_branch().sync()
    return AsyncStateGroup([forks.states[i] for i in winners or ()], forks.src_state, forks)


class _RaceState:
    """The branches of one race: who is done, and in which order."""

    def __init__(self, forks: ForkGroup[Any], first: int) -> None:
        self._forks = forks
        self._first = first
        self._call_segments = {i: state._branch.call_segments() for i, state in enumerate(forks.states)}
        self._won: list[int] = []
        self._failed: list[int] = []

    def wait(self) -> None:
        """Until enough have won, or too few can."""
        changed = threading.Event()
        with self._listening(changed.set):
            while not self._is_over():
                if not changed.wait(self._seconds_to_deadline()):
                    self._expire_overdue()
                changed.clear()

    async def wait_async(self) -> None:
        changed, notifier = asyncio.Event(), LoopNotifier.for_running_loop()
        with self._listening(lambda: notifier.notify(changed)):
            while not self._is_over():
                if not await wait_for_event(changed, self._seconds_to_deadline()):
                    self._expire_overdue()
                changed.clear()

    def end_losers(self) -> list[int] | None:
        """Ends all but the winners; their numbers, or None where too few were left."""
        enough = len(self._won) >= self._first
        winners = self._won[: self._first] if enough else []
        for index, state in enumerate(self._forks.states):
            if index not in winners and (enough or index not in self._failed[:1]):
                state._branch.cancel("this branch lost its race")
        return winners if enough else None

    def first_failed_branch(self) -> Any:
        return self._forks.states[self._failed[0]]

    def _is_over(self) -> bool:
        for index, call_segments in self._call_segments.items():
            if index not in self._won and index not in self._failed and all(each.call.done() for each in call_segments):
                (self._failed if any(each.failure() for each in call_segments) else self._won).append(index)
        pending = len(self._call_segments) - len(self._won) - len(self._failed)
        return len(self._won) >= self._first or len(self._won) + pending < self._first

    @contextmanager
    def _listening(self, listener: Callable[[], None]) -> Iterator[None]:
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
            each.call
            for call_segments in self._call_segments.values()
            for each in call_segments
            if not each.call.done()
        ]

    def _seconds_to_deadline(self) -> float | None:
        limits = [call.deadline for call in self._open_calls() if call.deadline is not None]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _expire_overdue(self) -> None:
        for call in self._open_calls():
            if call.deadline is not None and call.deadline <= time.monotonic():
                call.expire()
