"""Kernels that are compiled together, and called by their addresses."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType

from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.functions import KernelModule


class KernelLibrary:
    """Kernels whose arguments are int64, in one module: compiled when first used, or found in the cache on disk.

    Code that was compiled quickly may be replaced by optimized code while kernels are in use (`install`).
    """

    def __init__(self, name: str, *functions: Callable[..., None]) -> None:
        self.name = name
        self._functions = {function.__name__: function for function in functions if isinstance(function, FunctionType)}
        assert len(self._functions) == len(functions), "functions of different names"
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}

    @cached_property
    def _source_hashes(self) -> list[str]:
        files = sorted({function.__code__.co_filename for function in self._functions.values()})
        return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]

    @property
    def _path(self) -> Path | None:
        return object_code.cache_path(self.name, *self._functions, *self._source_hashes)

    @property
    def _quick_path(self) -> Path | None:
        return None if self._path is None else self._path.with_name(f"quick-{self._path.name}")

    @property
    def is_missing(self) -> bool:
        """Whether there is a cache, but these kernels are not in it, optimized."""
        return self._path is not None and not self._path.is_file()

    def load(self) -> dict[str, int]:
        """Returns the kernels' addresses by their names: as they are now, from the cache, or compiled and optimized."""
        if not self._addresses:
            with self._lock:
                if not self._addresses:
                    code = self.cached()
                    if code is None:
                        code = self.compile_optimized()
                    self._addresses = self._loaded(code)
        return self._addresses

    def install(self, code: bytes) -> None:
        """Uses this object file from the next call of a kernel on; a call that has begun ends as it began."""
        addresses = self._loaded(code)
        with self._lock:
            self._addresses = addresses

    @property
    def is_loaded(self) -> bool:
        """Whether kernels can be called without compiling."""
        return bool(self._addresses)

    def load_cached(self) -> bool:
        """Loads what the cache has, optimized or else compiled quickly; returns whether it is optimized."""
        optimized = self.cached()
        code = self.cached(quick=True) if optimized is None else optimized
        if code is not None:
            self.install(code)
        return optimized is not None

    def cached(self, quick: bool = False) -> bytes | None:
        """Returns the optimized object file in the cache, or the one compiled quickly; None if there is none."""
        return object_code.read(self._quick_path if quick else self._path)

    def compile_quick(self) -> bytes:
        """Returns an object file compiled with few optimizations, and caches it until there is an optimized one."""
        code = object_code.quick_code(self._module)
        object_code.write(self._quick_path, code)
        return code

    def compile_optimized(self) -> bytes:
        """Returns the optimized object file, and caches it."""
        machine = object_code.target_machine()
        code: bytes = machine.emit_object(object_code.optimized(self._module, machine))
        object_code.write(self._path, code)
        if self._quick_path is not None:
            with contextlib.suppress(OSError):
                self._quick_path.unlink()
        return code

    @cached_property
    def _module(self) -> str:
        """The text of the LLVM module."""
        module = KernelModule(self.name)
        for name, function in self._functions.items():
            module.add_entry(name, function)
        return str(module.module)

    def _loaded(self, code: bytes) -> dict[str, int]:
        names = tuple(self._functions)
        return dict(zip(names, object_code.load(code, names), strict=True))
