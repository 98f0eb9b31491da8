"""Torch is an optional dependency: whether it is installed, and the error of what needs it where it is not.

Packed weights on a CPU run without it. Everything else calls `require_torch` when a runtime starts, before it imports
a module that imports torch.
"""

from __future__ import annotations

import importlib
import platform
from importlib.util import find_spec

from plait.runtime.errors import InputError

GPU_INSTALL = "pip install 'plait[gpu]'"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux brings CUDA, several gigabytes
NEEDED_FOR = "GPUs, dtype='float32' and 'float16', and weights that the CPU kernels do not pack"


def torch_is_installed() -> bool:
    """Whether torch can be found. Does not import it."""
    return find_spec("torch") is not None


def install_command(device: str = "cpu") -> str:
    """The command that installs torch for a device ("cpu", "cuda", "mps", ...)."""
    if device.partition(":")[0] != "cpu":
        return GPU_INSTALL
    return "pip install 'plait[torch]'" + (f" --extra-index-url {CPU_INDEX}" if platform.system() == "Linux" else "")


def require_torch(needed_by: str, device: str = "cpu", reason: str = "") -> None:
    """Imports torch. Raises InputError if that fails: it names what needs torch, and the command that installs it.

    needed_by: the subject of the sentence "... needs torch". reason: why, in parentheses behind it.
    """
    subject = f"{needed_by} needs torch" + (f" ({reason})" if reason else "")
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise InputError(f"{subject}. It is installed, but cannot be imported: {error}") from error
        raise InputError(f"{subject}. It is not installed: {install_command(device)}") from None
    except (ImportError, OSError) as error:  # a damaged installation, or a missing library of the system
        raise InputError(f"{subject}. It is installed, but cannot be imported: {error!s:.300}") from error
