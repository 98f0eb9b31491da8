"""Reports the environment, and what plait chooses on it: the lines of `plait check`. Runs with torch and without."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from plait.host.terminal import Concern
from plait.kernels.packed_support import describe_packed_weights
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import resolve_dtype_name
from plait.runtime.executor.host_machine import has_nvidia_driver, host_kv_cache_budget, num_threads
from plait.runtime.torch_import import GPU_INSTALL, NEEDED_FOR, install_command, require_torch, torch_is_installed

PACKAGES = (
    "plait",
    "torch",
    "triton",
    "llvmlite",
    "pyzmq",
    "msgspec",
    "tokenizers",
    "outlines-core",
    "llguidance",
    "interegular",
)
_NOT_INSTALLED = "not installed"


def report() -> dict[str, str]:
    """Returns name -> value of each line, in order.

    >>> report()["device"]                                                   # doctest: +SKIP
    'cpu (2 threads of 2 processors, AVX512)'
    """
    lines = {"python": f"{platform.python_version()} on {platform.platform()}"}
    versions = {name: _version(name) for name in PACKAGES}
    if not torch_is_installed():
        versions["torch"] = f"{_NOT_INSTALLED}; needed for {NEEDED_FOR}: {install_command(_gpu_or_cpu())}"
        return lines | _lines_without_torch() | versions
    try:
        require_torch("`plait check`")
    except InputError as error:
        return lines | _lines_without_torch() | versions | {"torch": Concern(error)}
    return lines | _torch_lines() | versions


def _torch_lines() -> dict[str, str]:
    from plait.kernels.kernel_selection import select_kernels
    from plait.runtime.executor.torch_device import choose_device, describe_device, device_kv_cache_budget
    from plait.runtime.executor.torch_runner import choose_dtype

    device = choose_device(EngineConfig().device)
    dtype = choose_dtype("auto", device)
    return {
        "device": describe_device(device),
        "dtype": str(dtype).removeprefix("torch."),
        **{f"kernels: {name}": chosen for name, chosen in select_kernels(device, dtype).names.items()},
        "KV cache budget": _gibibytes(device_kv_cache_budget(device)),
    }


def _lines_without_torch() -> dict[str, str]:
    device = f"cpu ({num_threads()} threads of {os.cpu_count()} processors)"
    return {
        "device": Concern(f"{device}; for the NVIDIA GPU: {GPU_INSTALL}") if has_nvidia_driver() else device,
        "dtype": resolve_dtype_name("auto", "cpu"),
        "kernels: packed weights": describe_packed_weights("cpu"),
        "kernels: other weights": "none: torch cannot be imported",
        "KV cache budget": _gibibytes(host_kv_cache_budget()),
    }


def _gpu_or_cpu() -> str:
    return "cuda" if has_nvidia_driver() else "cpu"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _NOT_INSTALLED
