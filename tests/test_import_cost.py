"""The modules that imports of plait load, and the public names that are imported lazily."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest


def modules_after(code: str) -> set[str]:
    """The names of the modules that a new process has loaded after running `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_plait_loads_no_heavy_module() -> None:
    """Public names that neither start a runtime nor call a service load none either."""
    heavy_names = {"Anthropic", "Engine", "Graph", "LiteLLM", "OpenAI", "Runtime", "RuntimeEndpoint"}
    loaded = modules_after(
        f"import plait; [getattr(plait, name) for name in plait.__all__ if name not in {heavy_names}]"
    )
    assert not {"torch", "llvmlite", "transformers", "triton", "zmq", "tokenizers", "fastapi", "jinja2"} & loaded


def test_the_modules_that_start_the_runtime_load_no_heavy_module() -> None:
    """`plait serve` starts the runtime process before it imports the server, its client and the tokenizer."""
    loaded = modules_after("import plait.cli, plait.runtime.server.serve")
    heavy = {"numpy", "zmq", "tokenizers", "uvicorn", "fastapi", "tqdm", "plait.runtime.client.client", "plait.lang"}
    assert not heavy & loaded


def test_constrained_loads_neither_lang_nor_runtime() -> None:
    loaded = modules_after("import plait.constrained")
    assert not [name for name in loaded if name.startswith(("plait.lang", "plait.runtime"))]


def test_the_packed_runner_does_not_load_torch() -> None:
    """Loading torch takes a second and 180 MB, more than everything else in the runtime process together."""
    loaded = modules_after("import plait.runtime.process.builder, plait.runtime.executor.packed_cpu_runner")
    assert not {"torch", "numba", "transformers", "scipy", "pydantic", "sympy"} & loaded


def test_type_checkers_see_the_public_names() -> None:
    """The imports for type checkers, the table of lazy imports and `__all__` have the same names."""
    import plait

    (for_checkers,) = (node for node in ast.parse(Path(plait.__file__).read_text()).body if isinstance(node, ast.If))
    imports = (node for node in for_checkers.body if isinstance(node, ast.ImportFrom))
    module_of = {name.name: node.module for node in imports for name in node.names}
    assert module_of == plait._MODULE_OF
    assert sorted({*module_of} - {"map"}) == plait.__all__ and {*module_of} <= set(dir(plait))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018


def test_subpackages_are_attributes_of_plait() -> None:
    code = "import plait; print(plait.constrained.__name__, plait.runtime.__name__, plait.lang.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["plait.constrained", "plait.runtime", "plait.lang"], done.stderr
