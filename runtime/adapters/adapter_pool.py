"""The adapters of a runtime: all that calls may name, and those that are resident, each in a slot of the model's.

Others are kept in memory without a slot, as far as `AdapterSlots.spare_bytes` allows: those that were read for waiting
requests, and those used most recently.

Files are read in a thread of low priority, one adapter at a time. A read that hangs, as on a mount that is gone, is
left to its thread after READ_DEADLINE_S, and the next one has another thread. All else runs in the scheduler's thread,
between steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from plait.host.background_calls import BackgroundCalls
from plait.runtime.adapters.adapter import Adapter
from plait.runtime.adapters.load import AdapterFiles, OpenAdapter, open_adapter, reopen_adapter
from plait.runtime.errors import InputError, ModelError, PlaitError, QueueTimeout
from plait.runtime.models.config import ModelConfig
from plait.runtime.weights.checkpoint import expected_shapes

MAX_RESIDENT_BYTES = 4 << 30  # of the files of resident adapters, where no number is set
SMALL_BYTES = 16 << 20  # smaller files count as so many
MAX_NAMES = 1 << 16
NICENESS = 5  # of the threads that read
READ_DEADLINE_S = 30.0
MAX_HANGING = 64  # reads beyond their deadline; with more, every further read fails at once


class AdapterSlots(Protocol):
    """Where a decoder has its adapters. spare_bytes: of adapters that may be kept without a slot, beside the one read
    last."""

    spare_bytes: int

    def prepare(self, adapter: Adapter) -> Any:
        """The adapter as `place` takes it; called in any thread."""

    def num_bytes(self, adapter: Any) -> int:
        """The memory that a prepared adapter takes."""

    def place(self, slot: int, adapter: Any) -> None:
        """Sets the adapter of a slot, which no step uses; None empties it."""


class Loaded(NamedTuple):
    """The end of `AdapterPool.begin_load`. adapter: its id. error: why it is not resident."""

    adapter: str
    error: PlaitError | None


class Registered(NamedTuple):
    """The end of `AdapterPool.begin_register`. key: the caller's. error: why nothing has changed."""

    key: Any
    error: PlaitError | None


class _Read(NamedTuple):
    """What the thread has read. adapter: its id. prepared: for `AdapterSlots.place`. num_bytes: of its memory."""

    adapter: str
    files: AdapterFiles
    prepared: Any
    num_bytes: int


class _Registration(NamedTuple):
    """As the arguments of `begin_register`."""

    key: Any
    name: str
    path: str
    replace: bool


class _Reading(NamedTuple):
    """What a thread reads: a registration, or an adapter by its id. name: in errors."""

    job: _Registration | str
    name: str
    deadline: float


class AdapterPool:
    """Adapters have ids of 32 hexadecimal digits. That of an adapter that was read when it was named is the digest of
    its numbers, that of another one the identity of its files, which may not change then. So texts computed with equal
    ids were computed with equal numbers.

    paths: name -> folder or file. If there are at most as many as slots, all are read now; else the headers only.
    make_slots: returns so many slots. Raises InputError and ModelError.

    names: name -> id. slots: id -> slot of the resident ones, least recently used first. kept: id -> those without a
    slot, in the order in which they came. wanted: the ids that requests wait for, which are dropped last.
    """

    def __init__(
        self, config: ModelConfig, paths: Mapping[str, str], num_slots: int, make_slots: Callable[[int], AdapterSlots]
    ) -> None:
        self._config, self._shapes = config, expected_shapes(config)
        self.names: dict[str, str] = {}
        self.slots: dict[str, int] = {}
        self.kept: dict[str, _Read] = {}
        self.wanted: frozenset[str] = frozenset()
        self._placed: dict[str, _Read] = {}  # as `slots`
        opened = {name: open_adapter(name, path, config, self._shapes) for name, path in paths.items()}
        sizes = [adapter.files.num_bytes for adapter in opened.values()]
        self.num_slots = num_slots or _num_slots(sizes)
        is_partial = len(opened) > self.num_slots
        num_empty = self.num_slots if is_partial else self.num_slots - len(opened)
        self._device = make_slots(self.num_slots)
        most = max(sizes, default=SMALL_BYTES)
        self.missing_bytes = most * (num_empty + 1)  # of adapters that come later, one of them without a slot
        self._free = list(reversed(range(self.num_slots)))
        self._files: dict[str, AdapterFiles] = {}  # of named adapters, and of those that sessions still have
        self._num_uses, self._num_sessions = Counter[str](), Counter[str]()  # names and sessions; sessions
        self._calls: BackgroundCalls[_Reading, _Read | PlaitError] | None = None
        self._registrations: deque[_Registration] = deque()
        self._running: _Reading | None = None
        self._hanging: list[_Reading] = []  # whose end has been told
        self._ended: list[Loaded | Registered] = []  # not collected yet
        for name, adapter in opened.items():
            if is_partial:
                self._name(name, adapter.files.identity, adapter.files)
            else:
                self._add(name, self._read(adapter))

    # -- names --------------------------------------------------------------------------------------

    def begin_register(self, key: Any, name: str, path: str, replace: bool) -> None:
        """Begins to read an adapter under a name, which another one has only with `replace`. `collect` tells the end.

        Calls that began with the adapter that had the name before end with that one. Raises InputError.
        """
        self._check_name(name, replace)
        self._registrations.append(_Registration(key, name, path, replace))
        self._begin_next()

    def unregister(self, name: str) -> None:
        """Takes the name from an adapter; sessions that have it keep it. Raises InputError."""
        if name not in self.names:
            raise InputError(f"there is no adapter {name!r:.100}", field="lora_name")
        self._count_use(self.names.pop(name), -1)

    def count_session(self, adapter: str, number: int) -> None:
        """Counts a session that has an adapter (1), or has it no longer (-1)."""
        self._num_sessions[adapter] += number
        self._count_use(adapter, number)

    def has_name(self, adapter: str) -> bool:
        """Whether a name stands for the adapter. One without is there for the sessions that have it, and its files are
        more likely to have changed before it is read again."""
        return self._num_uses[adapter] > self._num_sessions[adapter]

    def _count_use(self, adapter: str, number: int) -> None:
        """Counts a name or a session of an adapter; without any it is forgotten."""
        self._num_uses[adapter] += number
        if not self._num_uses[adapter]:
            del self._num_uses[adapter], self._num_sessions[adapter], self._files[adapter]
            if adapter in self.slots:
                self.evict(adapter)
            self.kept.pop(adapter, None)

    def _check_name(self, name: str, replace: bool) -> None:
        if name in self.names and not replace:
            raise InputError(f"the adapter {name!r:.100} has already been loaded", field="lora_name")
        if len(self.names) >= MAX_NAMES:
            raise InputError(f"there are {MAX_NAMES} adapters already")

    def _add(self, name: str, read: _Read) -> None:
        """Gives a name to an adapter that was read, and a slot if one is free."""
        before = self.names.get(name)
        self._name(name, read.adapter, read.files)
        self._keep(read)
        if self.has_free_slot and read.adapter not in self.slots:
            self.place(read.adapter)
        if before is not None:
            self._count_use(before, -1)

    def _name(self, name: str, adapter: str, files: AdapterFiles) -> None:
        self.names[name], self._files[adapter] = adapter, files
        self._count_use(adapter, 1)

    # -- residence ----------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether all adapters are resident."""
        return len(self.slots) == len(self._files)

    @property
    def is_reading(self) -> bool:
        """Whether another read has to wait."""
        return self._running is not None

    def hangs(self, adapter: str) -> bool:
        """Whether `begin_load` fails at once: a thread still reads the adapter, or too many threads hang."""
        return any(adapter == reading.job for reading in self._hanging) or len(self._hanging) >= MAX_HANGING

    @property
    def has_free_slot(self) -> bool:
        """Whether an adapter can be placed without taking another one's slot."""
        return bool(self._free)

    @property
    def has_room(self) -> bool:
        """Whether another adapter can be read beside those of `wanted` that are kept."""
        sizes = [self.kept[adapter].num_bytes for adapter in self.wanted if adapter in self.kept]
        return not sizes or sum(sizes) < self._device.spare_bytes

    def touch(self, adapter: str) -> None:
        """Notes that a step uses a resident adapter."""
        self.slots[adapter] = self.slots.pop(adapter)

    def begin_load(self, adapter: str) -> None:
        """Begins to read an adapter that is neither resident nor kept, if it does not hang. It is kept then. No other
        one may be read now."""
        files = self._files[adapter]
        if self.hangs(adapter):
            self._ended.append(Loaded(adapter, _timeout(files.name)))
            return
        assert self._running is None
        self._start(adapter, files.name, lambda: self._read(reopen_adapter(files, self._config, self._shapes), adapter))

    def place(self, adapter: str) -> None:
        """Gives a free slot to an adapter that is kept."""
        self._placed[adapter] = read = self.kept.pop(adapter)
        self.slots[adapter] = slot = self._free.pop()
        self._device.place(slot, read.prepared)

    def evict(self, adapter: str) -> None:
        """Frees the slot of an adapter that no running request has."""
        slot, read = self.slots.pop(adapter), self._placed.pop(adapter)
        self._device.place(slot, None)
        self._free.append(slot)
        if self._device.spare_bytes:
            self._keep(read, is_evicted=True)

    def collect(self) -> list[Loaded | Registered]:
        """What has ended since the last call."""
        for reading, read in self._calls.collect() if self._calls is not None else ():
            if reading is self._running:
                self._end(reading.job, read)
                self._running = None
                continue
            self._hanging = [other for other in self._hanging if other is not reading]
            if isinstance(reading.job, str) and isinstance(read, _Read):
                self._keep(read)  # slow, but there: the next request does not read it again
        if self._running is not None and time.monotonic() >= self._running.deadline:
            late, self._running = self._running, None
            self._hanging.append(late)
            self._end(late.job, _timeout(late.name))
        self._begin_next()
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        """The time (`time.monotonic`) from which there is something to `collect`; None: when a descriptor tells."""
        return 0.0 if self._ended else None if self._running is None else self._running.deadline

    def filenos(self) -> list[int]:
        """The descriptors that are readable when there is something to `collect`."""
        return [] if self._calls is None else [self._calls.fileno()]

    def close(self) -> None:
        """Forgets what the thread reads."""
        if self._calls is not None:
            self._calls.close()

    def _end(self, job: _Registration | str, read: _Read | PlaitError) -> None:
        if isinstance(job, _Registration):
            self._ended.append(Registered(job.key, self._finish(job, read)))
            return
        if isinstance(read, _Read):
            self._keep(read)
        self._ended.append(Loaded(job, read if isinstance(read, PlaitError) else None))

    def _finish(self, job: _Registration, read: _Read | PlaitError) -> PlaitError | None:
        """Names what was read, unless the name was taken meanwhile."""
        if isinstance(read, PlaitError):
            return read
        try:
            self._check_name(job.name, job.replace)
        except InputError as error:
            return error
        self._add(job.name, read)
        return None

    def _keep(self, read: _Read, is_evicted: bool = False) -> None:
        """Keeps an adapter in memory, if anybody still has it, and drops others that have no room beside it. One that
        is_evicted goes itself rather than one that is wanted."""
        self.kept.pop(read.adapter, None)
        if read.adapter in self._files and read.adapter not in self.slots and self._make_room(not is_evicted):
            self.kept[read.adapter] = read

    def _make_room(self, drops_wanted: bool = True) -> bool:
        """Drops adapters that are kept until those left have room beside another one: first those that nobody waits
        for, and others if it drops_wanted. Returns False, and drops nothing, if there is not enough to drop."""
        excess, victims = sum(read.num_bytes for read in self.kept.values()) - self._device.spare_bytes, list[str]()
        for adapter in sorted(self.kept, key=self.wanted.__contains__):
            if excess <= 0:
                break
            if adapter in self.wanted and not drops_wanted:
                return False
            victims.append(adapter)
            excess -= self.kept[adapter].num_bytes
        for adapter in victims:
            del self.kept[adapter]
        return True

    # -- the threads --------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        """Begins the next registration if nothing is read."""
        while self._registrations and self._running is None:
            job = self._registrations.popleft()
            if len(self._hanging) >= MAX_HANGING:
                self._end(job, _timeout(job.name))
            else:
                self._start(job, job.name, partial(self._open_and_read, job))

    def _start(self, job: _Registration | str, name: str, read: Callable[[], _Read]) -> None:
        def guarded() -> _Read | PlaitError:
            try:
                return read()
            except PlaitError as error:
                return error
            except Exception as error:
                return ModelError(f"the adapter could not be read ({type(error).__name__}: {error!s:.200})")

        self._make_room()  # before what is read takes the memory of a device
        self._running = _Reading(job, name, time.monotonic() + READ_DEADLINE_S)
        self._calls = self._calls or BackgroundCalls(NICENESS)
        self._calls.begin(self._running, guarded)

    def _open_and_read(self, job: _Registration) -> _Read:
        return self._read(open_adapter(job.name, job.path, self._config, self._shapes))

    def _read(self, opened: OpenAdapter, adapter: str = "") -> _Read:
        """Reads an adapter. adapter: its id; "" is the digest of its numbers."""
        read = opened.read()
        prepared = self._device.prepare(read)
        return _Read(adapter or read.digest(), opened.files, prepared, self._device.num_bytes(prepared))


def _timeout(name: str) -> QueueTimeout:
    return QueueTimeout(f"the files of the adapter {name!r:.100} could not be read within {READ_DEADLINE_S:g} s")


def _num_slots(sizes: list[int]) -> int:
    """As many as fit into MAX_RESIDENT_BYTES."""
    if sum(sizes) <= MAX_RESIDENT_BYTES and sizes:
        return len(sizes)
    return max(1, MAX_RESIDENT_BYTES // max([SMALL_BYTES, *sizes]))
