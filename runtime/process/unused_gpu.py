"""The warning of a runtime that uses the CPU of a machine with an NVIDIA GPU, because torch is not installed."""

from __future__ import annotations

import warnings

from plait.runtime.executor.host_machine import has_nvidia_driver
from plait.runtime.torch_import import GPU_INSTALL, torch_is_installed


def warn_of_unused_gpu(device: str) -> None:
    """Warns where the device "auto" is the CPU only because torch is not installed. Call it from a constructor."""
    if device == "auto" and has_nvidia_driver() and not torch_is_installed():
        warnings.warn(
            f"plait uses the CPU, because torch is not installed. For the NVIDIA GPU: {GPU_INSTALL}. "
            "device='cpu' uses the CPU without this warning",
            stacklevel=3,
        )
