"""`Job`: spreads the items of a batch over actors, and repeats those whose actor ended. Knows nothing of Ray.

    groups ──> an actor's queue ──> running on the actor ──> Done
                     ▲                      │
                     └──── again, later ◄───┘ the actor was lost

An actor takes a whole group, so that one engine computes the prefix that its items share. When no group is left, it
takes half of what waits at the actor with most.

Nobody knows which of the items that ran on a lost actor ended it. They run again, `max_attempts` times in all, the last
time alone on an actor. So an item fails only if an actor ended while it ran nothing else.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.messages import Welcome

POLL_S = 1.0
MAX_IDLE_LOSSES = 3
"""Actors that are lost while they start or run nothing are replaced so often in a row, then no more."""


def warn_of_lost_actor(reason: str) -> None:
    """Warns that an actor has ended. What it ran is repeated, so nobody else may notice."""
    warnings.warn(f"an actor of the cluster ended: {reason}", RuntimeWarning, stacklevel=2)


@dataclass(frozen=True)
class Ready:
    """The engine of an actor has started with this model."""

    actor: int
    model: Welcome


@dataclass(frozen=True)
class Done:
    """An actor has finished an item, without or with an error of the item."""

    actor: int
    item: int
    result: str


@dataclass(frozen=True)
class Lost:
    """An actor has ended, or its engine has. `cannot_start`: its settings are at fault, so another would end too."""

    actor: int
    reason: str
    cannot_start: Exception | None = None


Event: TypeAlias = Ready | Done | Lost


class Actors(Protocol):
    """What a job needs of a cluster."""

    def start(self) -> int:
        """Asks for an actor. Returns its number at once; a Ready or Lost follows."""

    def submit(self, actor: int, item: int) -> None:
        """Runs an item; a Done follows, or the Lost of its actor."""

    def stop(self, actor: int) -> None:
        """Ends an actor. No event of it follows."""

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """Waits for events, at most so long. After the Lost of an actor no event of it follows."""


@dataclass(frozen=True)
class Finished:
    """An item has ended: with a result of its actor, or because its actors were lost (`failure` says how)."""

    item: int
    result: str = ""
    failure: str = ""


@dataclass
class _Actor:
    asked_s: float
    is_ready: bool = False
    waiting: deque[int] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    runs_alone: bool = False  # what it runs is the last attempt of an item


class Job:
    """Runs items on `num_actors` actors, each with at most `capacity` items at a time.

    start_timeout_s: how long an actor may take from `start` to Ready.
    An actor with another model than the first one is not used. on_lost: called with the reason when an actor is lost.
    """

    def __init__(
        self,
        actors: Actors,
        *,
        num_actors: int,
        capacity: int,
        max_attempts: int,
        start_timeout_s: float,
        on_lost: Callable[[str], None] = warn_of_lost_actor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._clock = actors, clock
        self._capacity, self._max_attempts, self._start_timeout_s = capacity, max_attempts, start_timeout_s
        self._on_lost = on_lost
        self._groups: deque[list[int]] = deque()
        self._alone: deque[int] = deque()  # items whose last attempt comes
        self._solo: int | None = None  # the actor that runs them, while there are others to run elsewhere
        self._failures: dict[int, list[str]] = {}
        self._unfinished: set[int] = set()
        self._idle_losses = 0
        self._last_reason = "no actor was started"
        self._start_error: Exception | None = None
        self._model: Welcome | None = None  # of the first actor that has started
        self._actors: dict[int, _Actor] = {}
        for _ in range(num_actors):
            self._start_actor()

    def wait_until_ready(self) -> Welcome:
        """Waits for the first actor, and returns its model. Raises the error of the last one if none can start."""
        while self._model is None:
            self._handle_events()
            if not self._actors:
                raise self._start_error or RuntimeGone(f"no actor could start: {self._last_reason}")
        return self._model

    def run(self, groups: Sequence[Sequence[int]]) -> Iterator[Finished]:
        """Runs the items. Yields each one exactly once, when it has ended. The first groups begin first."""
        self._groups.extend(list(group) for group in groups)
        self._unfinished = {item for group in groups for item in group}
        while self._unfinished:
            if not self._actors:
                yield from self._fail_all()
                return
            self._assign()
            yield from self._handle_events()

    # -- events -----------------------------------------------------------------------------------

    def _handle_events(self) -> list[Finished]:
        finished: list[Finished] = []
        for event in self._cluster.next_events(POLL_S):
            actor = self._actors.get(event.actor)
            if actor is None:
                continue
            match event:
                case Ready(number, model):
                    self._greet(number, actor, model)
                case Done(_, item, result):
                    actor.running.discard(item)
                    self._idle_losses = 0
                    self._unfinished.remove(item)
                    finished.append(Finished(item, result))
                case Lost(number, reason, cannot_start):
                    finished += self._lose(number, reason, cannot_start)
        for number, actor in list(self._actors.items()):
            if not actor.is_ready and self._clock() - actor.asked_s > self._start_timeout_s:
                self._cluster.stop(number)
                text = f"an actor did not start within {self._start_timeout_s:g} s"
                finished += self._lose(number, text, RuntimeGone(f"{text}; `ray status` shows what it waits for"))
        return finished

    def _start_actor(self) -> None:
        self._actors[self._cluster.start()] = _Actor(self._clock())

    def _greet(self, number: int, actor: _Actor, model: Welcome) -> None:
        first = self._model = self._model or model
        if (model.model_fingerprint, model.vocab_size) == (first.model_fingerprint, first.vocab_size):
            actor.is_ready = True
            return
        self._cluster.stop(number)
        text = f"an actor has another model than the first one: {model.model_path}, {first.model_path}"
        self._lose(number, text, InputError(text))

    def _lose(self, number: int, reason: str, cannot_start: Exception | None) -> list[Finished]:
        """Returns the items that fail now; the others of this actor run again."""
        actor = self._actors.pop(number)
        self._last_reason, self._start_error = reason, cannot_start or self._start_error
        self._idle_losses = 0 if actor.running else self._idle_losses + 1
        self._on_lost(reason)
        if cannot_start is None and self._idle_losses <= MAX_IDLE_LOSSES + len(self._actors):
            self._start_actor()
        if actor.waiting:
            self._groups.appendleft(list(actor.waiting))
        failed, again = [], []
        for item in sorted(actor.running):
            reasons = self._failures.setdefault(item, [])
            reasons.append(reason)
            if len(reasons) >= self._max_attempts:
                self._unfinished.remove(item)
                failed.append(Finished(item, failure=_failure_text(reasons)))
            elif len(reasons) == self._max_attempts - 1:
                self._alone.append(item)
            else:
                again.append(item)
        if again:
            self._groups.appendleft(again)
        return failed

    def _fail_all(self) -> Iterator[Finished]:
        text = f"no actor is left to run it; the last one: {self._last_reason}"
        for item in sorted(self._unfinished):
            yield Finished(item, failure=text)
        self._unfinished.clear()

    # -- assigning --------------------------------------------------------------------------------

    def _assign(self) -> None:
        self._choose_solo()
        ready = [(number, actor) for number, actor in self._actors.items() if actor.is_ready]
        for number, actor in ready:
            if actor.running:
                continue
            takes_alone = self._alone and not actor.waiting and (number == self._solo or not self._groups)
            actor.runs_alone = bool(takes_alone)
            if takes_alone:
                self._submit(number, actor, self._alone.popleft())
        while ready:  # one item each in turn, so that few items are spread over all actors
            ready = [(number, actor) for number, actor in ready if self._submit_next(number, actor)]

    def _choose_solo(self) -> None:
        """Chooses the actor with least to do, if items must run alone. It runs what it has begun, then them."""
        if not self._alone:
            self._solo = None
        elif self._solo not in self._actors:
            ready = [number for number, actor in self._actors.items() if actor.is_ready]
            self._solo = min(ready, key=lambda number: len(self._actors[number].running), default=None)
            if self._solo is not None and (waiting := self._actors[self._solo].waiting):
                self._groups.appendleft(list(waiting))
                waiting.clear()

    def _submit_next(self, number: int, actor: _Actor) -> bool:
        """Submits one item that waits. Returns False if none does, or if the actor has enough."""
        if actor.runs_alone or len(actor.running) >= self._capacity:
            return False
        if not actor.waiting and number != self._solo:
            self._take_group(actor)
        if not actor.waiting:
            return False
        self._submit(number, actor, actor.waiting.popleft())
        return True

    def _submit(self, number: int, actor: _Actor, item: int) -> None:
        actor.running.add(item)
        self._cluster.submit(number, item)

    def _take_group(self, actor: _Actor) -> None:
        """Gives the actor a group, or else half of what waits at the actor with most."""
        if self._groups:
            actor.waiting.extend(self._groups.popleft())
            return
        longest = max(self._actors.values(), key=lambda other: len(other.waiting))
        for _ in range((len(longest.waiting) + 1) // 2):
            actor.waiting.appendleft(longest.waiting.pop())


def _failure_text(reasons: list[str]) -> str:
    """
    >>> _failure_text(["killed", "killed", "exit code 3"])
    'its actor ended 3 times while it ran: killed; killed; exit code 3'
    """
    times = "once" if len(reasons) == 1 else f"{len(reasons)} times"
    return f"its actor ended {times} while it ran: {'; '.join(reasons)}"
