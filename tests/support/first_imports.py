"""Imports of large packages whose modules Python has not compiled yet, as in a fresh clone: each is compiled once.

All workers of a run import the same modules in the same order, so that each would compile all of them at the same time.
Instead each begins with another package, and waits for those that another worker is importing.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import warnings
from pathlib import Path

ARE_NOT_COMPILED = "PLAIT_TESTS_COMPILE"  # set by the process that starts the workers
MODULES = (
    *("torch", "transformers.models.llama.modeling_llama", "peft"),
    *("anthropic", "openai", "ray.serve"),
    *("sympy", "schemathesis", "mcp.server.mcpserver"),
)


def note_whether_compiled() -> None:
    """Tells the workers that will be started whether the first of MODULES is compiled."""
    spec = importlib.util.find_spec(MODULES[0])
    if spec is not None and spec.cached is not None and not Path(spec.cached).exists():
        os.environ[ARE_NOT_COMPILED] = "1"


def import_compiling_once(worker: str) -> None:
    """`worker`: gw0, gw1, ..., which begin with other packages. Those that are not installed are left out."""
    begin = 3 * int(worker.removeprefix("gw")) % len(MODULES)
    for name in (*MODULES[begin:], *MODULES[:begin]):
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is not None and spec.origin is not None:
            with open(spec.origin) as file, warnings.catch_warnings(), contextlib.suppress(ImportError):
                warnings.simplefilter("ignore")
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                importlib.import_module(name)
