"""A launch of a Triton kernel as a value, which can be repeated at a small part of the host's time.

Triton finds the compiled kernel of a launch by the types, values and alignment of all arguments, which takes the host
longer than the launch itself. Layers of one kind differ in the addresses of their caches only, so that what was found
for the first of them is launched for the others directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver

FIRST_CACHE, NUM_CACHES = "k_cache", 4  # a repeatable kernel's parameters k_cache, v_cache, and their scales


class CacheTensors(NamedTuple):
    """The caches of one layer as the kernels take them, and their addresses."""

    tensors: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]

    @staticmethod
    def of(tensors: tuple[torch.Tensor, ...]) -> CacheTensors:
        return CacheTensors(tensors, tuple(tensor.data_ptr() for tensor in tensors))


class KernelLaunch:
    """A kernel's grid, its arguments in order, and by name its constants and Triton's options."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
        self._kernel, self._grid, self._arguments, self._constants = kernel, grid, arguments, constants

    def run(self) -> Any:
        """Launches. Returns what Triton compiled; None in its interpreter."""
        return self._kernel[self._grid](*self._arguments, **self._constants)

    def run_to_repeat(self) -> Callable[[CacheTensors], None]:
        """Launches. Returns a function that repeats the launch with the caches of another layer, on the same stream.

        They have the dtypes, strides and alignment of the first. Arguments are passed as addresses, because a launcher
        asks the driver about every tensor; the function keeps the tensors alive.
        """
        names, arguments = self._kernel.arg_names, self._arguments
        first_cache = names.index(FIRST_CACHE)
        before, behind = arguments[:first_cache], arguments[first_cache + NUM_CACHES :]
        compiled = self.run()
        if not isinstance(compiled, CompiledKernel):
            kernel, grid, constants = self._kernel, self._grid, self._constants
            return lambda caches: kernel[grid](*before, *caches.tensors, *behind, **constants)
        launch, stream = compiled[self._grid], _current_stream()
        first, last = _addresses(before), _addresses(behind)
        last += [self._constants[name] for name in names[len(arguments) :]]  # a launcher skips them

        def repeat(caches: CacheTensors, kept: tuple[Any, ...] = arguments) -> None:
            launch(*first, *caches.addresses, *last, stream=stream)

        return repeat


def _current_stream() -> Any:
    """The stream that Triton launches on in this thread."""
    active = driver.active
    return active.get_current_stream(active.get_current_device())


def _addresses(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments, and of tensors the addresses."""
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
