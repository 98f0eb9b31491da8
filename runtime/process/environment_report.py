"""Reports the environment, and what plait chooses on it: the lines of `plait check`."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from plait.kernels.kernel_selection import select_kernels
from plait.runtime.config import EngineConfig
from plait.runtime.executor.torch_device import choose_device, device_kv_cache_budget
from plait.runtime.executor.torch_runner import choose_dtype

PACKAGES = (
    "plait",
    "torch",
    "numba",
    "pyzmq",
    "msgspec",
    "tokenizers",
    "outlines-core",
    "llguidance",
    "interegular",
)


def report() -> dict[str, str]:
    """Returns name -> value of each line, in order.

    >>> report()["device"]                                                   # doctest: +SKIP
    'cpu (2 threads)'
    """
    device = choose_device(EngineConfig().device)
    dtype = choose_dtype("auto", device)
    kernels = select_kernels(device, dtype)
    lines = {"python": f"{platform.python_version()} on {platform.platform()}"}
    lines["device"] = _describe_device(device)
    lines["dtype"] = str(dtype).removeprefix("torch.")
    lines |= {f"kernels: {name}": chosen for name, chosen in kernels.names.items()}
    lines["KV cache budget"] = f"{device_kv_cache_budget(device) / 2**30:.2f} GiB"
    lines |= {name: _version(name) for name in PACKAGES}
    return lines


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads of {os.cpu_count()} processors, {_cpu_capability()})"


def _cpu_capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
