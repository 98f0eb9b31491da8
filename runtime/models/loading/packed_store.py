"""Packed weights of a model from the cache on disk, or packed now and stored there in the background.

A start maps the weights of an earlier one: they take no memory of their own, and processes share them. Whatever is
wrong with the cache, the weights are packed from the model's files.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from plait.host.terminal import Concern
from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.layouts import LAYOUTS
from plait.kernels.cpu.gemm.packed_weights import PackedPair, PackedWeight
from plait.runtime.config import WeightFormat
from plait.runtime.model_files import array_file, packed_cache
from plait.runtime.model_files.array_file import ArrayFile, Bytes, DamagedFile
from plait.runtime.model_files.packed_cache import CacheHeader, Source, UnusableFolder
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.registry import FAMILIES_BY_NAME

Packed = TypeVar("Packed", PackedWeight, PackedPair)
LOWEST_PRIORITY = 19
END_WAIT_S = 1.0
_SOURCES = (
    "models/loading/cpu_weights.py",
    "models/loading/packed_store.py",
    "models/rope.py",
    "model_files/array_file.py",
    "model_files/gguf.py",
    "model_files/safetensors_bytes.py",
    "weights/gguf_checkpoint.py",
    "weights/safetensors_checkpoint.py",
    "weights/stored_rows.py",
)
_GEMM_SOURCES = ("layouts.py", "gguf_blocks.py", "packed_weights.py")
_KERNEL_SOURCES = ("gguf_types.py", "matrix_layouts.py", "quantized_matrix.py")


class PackedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A weight (one layout) or a pair (two) in memory [tiles, bytes of a tile]. `units`: of a tile, for each layout."""

    name: str
    layouts: list[str]
    outputs: list[int]
    units: list[int]
    tiles: int

    @classmethod
    def of(cls, name: str, packed: PackedWeight | PackedPair) -> PackedEntry:
        parts = [packed] if isinstance(packed, PackedWeight) else [packed.first, packed.second]
        return cls(
            name,
            [part.layout.name for part in parts],
            [part.outputs for part in parts],
            [part.data.shape[1] for part in parts],
            len(packed.data),
        )

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of a tile of each layout."""
        return [LAYOUTS[layout].unit_bytes * units for layout, units in zip(self.layouts, self.units, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.tiles * sum(self.part_bytes)

    def packed(self, memory: Bytes) -> PackedWeight | PackedPair:
        """The weight or pair in this memory."""
        layouts = [LAYOUTS[layout] for layout in self.layouts]
        data = memory.reshape(self.tiles, -1)
        if len(layouts) == 1:
            return PackedWeight(data.reshape(self.tiles, self.units[0], -1), layouts[0], self.outputs[0])
        first, second = layouts
        return packed_weights.pair_of(data, (first, second), (self.outputs[0], self.outputs[1]), self.part_bytes[0])


_ENTRIES = msgspec.json.Decoder(list[PackedEntry])


class PackingThreads:
    """Runs jobs in a fixed number of threads, which end with the `with` block."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> PackingThreads:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, run: Callable[[Any], None], jobs: Sequence[Any]) -> None:
        """Calls `run` with each job, and returns when all are done."""
        if self._pool is None or len(jobs) < 2:
            packed_weights.run_in_turn(run, jobs)
            return
        for _ in self._pool.map(run, jobs):
            pass


class PackedStore:
    """The packed weights of a checkpoint in one format, by name."""

    def __init__(self, checkpoint: Checkpoint, weight_format: WeightFormat, threads: PackingThreads) -> None:
        self._header: CacheHeader | None = None  # of the file to write
        self._mapped: dict[str, list[PackedWeight | PackedPair]] = {}
        self._new: list[tuple[PackedEntry, Bytes]] = []
        try:
            if packed_cache.limit_bytes():
                sources = [Source.of(path) for path in checkpoint.paths]
                key = weights_key(checkpoint, weight_format)
                self._mapped = _find(key, threads)
                self._header = CacheHeader(key, sources, msgspec.Raw())
        except (UnusableFolder, OSError) as error:
            _warn(str(error))

    def get(self, name: str, pack: Callable[[], Sequence[Packed]]) -> Sequence[Packed]:
        """Returns the weights called `name`: mapped from the cache, or else what `pack` returns."""
        if name in self._mapped:
            return cast(Sequence[Packed], self._mapped[name])
        packed = pack()
        if self._header is not None:
            self._new += [(PackedEntry.of(name, item), item.data) for item in packed]
        return packed

    def save(self) -> BackgroundSave | None:
        """Begins to write what was packed, in a thread of lowest priority; None if there is nothing to write."""
        if self._header is None or sum(entry.nbytes for entry, _ in self._new) < packed_cache.MIN_BYTES:
            return None
        entries = msgspec.json.encode([entry for entry, _ in self._new])
        header = msgspec.structs.replace(self._header, entries=msgspec.Raw(entries))
        return BackgroundSave(header, [data for _, data in self._new])


class BackgroundSave:
    """Writes a file of the cache in a thread.

    A process that ends waits END_WAIT_S for it, and then gives it up and removes the unfinished file: the weights of 8
    billion parameters take ten seconds to write, and a server that unloads a model needs its memory.
    """

    def __init__(self, header: CacheHeader, arrays: Sequence[Bytes]) -> None:
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(header, arrays), name="plait-save", daemon=True)
        atexit.register(self.end)
        self._thread.start()

    def join(self) -> None:
        """Waits until the file is complete, or cannot be written."""
        self._thread.join()

    def end(self, wait_s: float = END_WAIT_S) -> None:
        """Gives the file up unless it is complete within `wait_s` seconds."""
        self._thread.join(wait_s)
        self._given_up.set()
        self._thread.join()

    def _run(self, header: CacheHeader, arrays: Sequence[Bytes]) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread
        try:
            packed_cache.store(header, arrays, self._check)
        except _GivenUp:
            pass  # the next start packs the weights again
        except UnusableFolder as error:
            _warn(str(error))
        finally:
            atexit.unregister(self.end)

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp


class _GivenUp(Exception):
    """The process ends before the file is complete."""


def weights_key(checkpoint: Checkpoint, weight_format: WeightFormat) -> str:
    """Returns the key of a checkpoint's packed weights in the cache. Raises OSError."""
    stored = [f"{name} {checkpoint.stored_type(name)}" for name in checkpoint.names()]
    family = FAMILIES_BY_NAME[checkpoint.config.architecture]
    layer = (family.layer, family.gguf_permuted_qk, sorted(family.gguf_layer_names.items()))
    depends_on = [_packing_hash(), checkpoint.container, weight_format, repr(layer), repr(checkpoint.config), *stored]
    return packed_cache.model_key(checkpoint.paths, depends_on)


def describe(checkpoint: Checkpoint, weight_format: WeightFormat) -> str:
    """Says for `plait check` where the packed weights of a checkpoint are on disk."""
    try:
        limit = packed_cache.limit_bytes()
        if not limit:
            return f"not kept on disk ({packed_cache.LIMIT_VARIABLE} is 0)"
        key = weights_key(checkpoint, weight_format)
        found = packed_cache.load(key)
        used = sum(status.st_size for _, status in packed_cache.stored_files())
        share = f"{used / 1e9:.1f} of {limit / 1e9:g} GB are used"
        if found is None:
            packed_cache.check_writable()
            return f"the next start packs them, and keeps them in {packed_cache.folder()}; {share}"
        size = packed_cache.path_of(key).stat().st_size
        return f"mapped from {packed_cache.path_of(key)} ({size / 1e6:.0f} MB); {share}"
    except DamagedFile as error:
        return f"the next start packs them again: {error}"
    except (UnusableFolder, OSError) as error:
        return Concern(f"not kept on disk: {error}")


@cache
def _packing_hash() -> str:
    """Returns a checksum of the sources that decide which bytes are packed."""
    runtime, gemm = Path(__file__).parents[2], Path(packed_weights.__file__).parent
    sources = [*(runtime / name for name in _SOURCES), *(gemm / name for name in _GEMM_SOURCES)]
    sources += [*(gemm.parents[1] / name for name in _KERNEL_SOURCES)]
    sources += sorted((runtime / "weights/quantized").glob("*.py"))
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in sources)):08x}"


def _find(key: str, threads: PackingThreads) -> dict[str, list[PackedWeight | PackedPair]]:
    """Returns the weights in the cache; none if its file is missing or damaged. Raises UnusableFolder."""
    try:
        found = packed_cache.load(key)
        return {} if found is None else _mapped_weights(*found, threads)
    except DamagedFile as error:
        packed_cache.remove(key)
        _warn(f"{packed_cache.path_of(key)} is packed again: {error}")
        return {}


def _mapped_weights(
    mapped: ArrayFile, header: CacheHeader, threads: PackingThreads
) -> dict[str, list[PackedWeight | PackedPair]]:
    """Raises DamagedFile."""
    try:
        entries = _ENTRIES.decode(header.entries)
        starts = array_file.array_starts([entry.nbytes for entry in entries])
        if starts[-1] != len(mapped.data):
            raise ValueError("its weights have another size")
        weights: dict[str, list[PackedWeight | PackedPair]] = {}
        for start, entry in zip(starts, entries, strict=False):
            weights.setdefault(entry.name, []).append(entry.packed(mapped.data[start : start + entry.nbytes]))
    except (ValueError, KeyError) as error:  # msgspec's errors, and layouts of another version
        raise DamagedFile(str(error)) from error
    mapped.check(threads.run)
    return weights


def _warn(reason: str) -> None:
    print(f"plait: packed weights are not kept for the next start: {reason}", file=sys.stderr, flush=True)
