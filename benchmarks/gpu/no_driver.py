"""A driver for Triton that launches nothing: kernels are bound and compiled as for an H100, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES = 227 << 10


class NoDriver:
    """What Triton asks of a GPU's driver, for a GPU that runs nothing."""

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", 90, 32)
        self.num_launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (object(), object(), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.num_launches += 1

        return launch


def install_no_driver() -> NoDriver:
    """Makes Triton launch nothing in this process."""
    no_driver = NoDriver()
    driver.set_active(no_driver)
    return no_driver
