"""Kernels that are compiled together, and called by their addresses."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType

from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.functions import KernelModule


class KernelLibrary:
    """Kernels whose arguments are int64, in one module: compiled when first used, or found in the cache on disk."""

    def __init__(self, name: str, *functions: Callable[..., None]) -> None:
        self.name = name
        self._functions = {function.__name__: function for function in functions if isinstance(function, FunctionType)}
        assert len(self._functions) == len(functions), "functions of different names"
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}

    @cached_property
    def _path(self) -> Path | None:
        files = sorted({function.__code__.co_filename for function in self._functions.values()})
        sources = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
        return object_code.cache_path(self.name, *self._functions, *sources)

    @property
    def is_missing(self) -> bool:
        """Whether there is a cache, but these kernels are not in it."""
        return self._path is not None and not self._path.exists()

    def load(self) -> dict[str, int]:
        """Returns the kernels' addresses by their names."""
        with self._lock:
            if not self._addresses:
                code = object_code.read(self._path)
                if code is None:
                    code = self._compile()
                    object_code.write(self._path, code)
                names = tuple(self._functions)
                self._addresses = dict(zip(names, object_code.load(code, names), strict=True))
            return self._addresses

    def _compile(self) -> bytes:
        module = KernelModule(self.name)
        for name, function in self._functions.items():
            module.add_entry(name, function)
        machine = object_code.target_machine()
        code: bytes = machine.emit_object(object_code.optimized(module.module, machine))
        return code
