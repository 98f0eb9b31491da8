"""An `AdapterPool` whose files are names, and whose thread is a list that the test works through."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

from plait.runtime.adapters import adapter_pool
from plait.runtime.adapters.load import AdapterFiles, OpenAdapter
from plait.runtime.errors import InputError


def identity(path):
    return blake2b(str(path).encode(), digest_size=16).hexdigest()


class ManualCalls:
    """In place of `BackgroundCalls`. `delay`: how often `collect` is called before a call has ended. `hung`: adapters
    and names whose calls do not end before they are taken out of it."""

    def __init__(self, delay):
        self.delay, self.begun, self.hung, self._running = delay, [], set(), []

    def begin(self, key, call):
        self.begun.append(key.job)
        self._running.append([self.delay, key, call])

    def collect(self):
        ended = [e for e in self._running if getattr(e[1].job, "name", e[1].job) not in self.hung]
        for entry in ended:
            entry[0] -= 1
        done = [entry for entry in ended if entry[0] < 0]
        self._running = [entry for entry in self._running if entry not in done]
        return [(key, call()) for _, key, call in done]

    def fileno(self):
        return -1

    def close(self):
        pass


class ManualSlots:
    """In place of a decoder's: the adapters that were placed, by slot. Each adapter has one byte."""

    def __init__(self, num_slots, spare_bytes=0):
        self.placed, self.spare_bytes = [None] * num_slots, spare_bytes

    def prepare(self, adapter):
        return adapter.name

    def num_bytes(self, adapter):
        return 1

    def place(self, slot, adapter):
        self.placed[slot] = adapter


def manual_pool(monkeypatch, names, num_slots, delay=2, spare=0):
    """A pool of adapters, which keeps `spare` without a slot, and its calls. A path that begins with "broken" cannot be
    read."""

    def opened(name, path, config=None, shapes=None):
        def read():
            if str(path).startswith("broken"):
                raise InputError(f"the adapter {name!r} is broken")
            return SimpleNamespace(name=name, digest=lambda: identity(path))

        files = AdapterFiles(name, Path(path), identity(path), 1)
        return SimpleNamespace(files=files, read=read)

    assert {"files", "read"} <= set(dir(OpenAdapter))
    calls = ManualCalls(delay)
    monkeypatch.setattr(adapter_pool, "expected_shapes", lambda config: {})
    monkeypatch.setattr(adapter_pool, "open_adapter", opened)
    monkeypatch.setattr(adapter_pool, "reopen_adapter", lambda files, *_: opened(files.name, files.path))
    monkeypatch.setattr(adapter_pool, "BackgroundCalls", lambda niceness: calls)
    pool = adapter_pool.AdapterPool(
        None, {name: name for name in names}, num_slots, lambda count: ManualSlots(count, spare)
    )
    return pool, calls
