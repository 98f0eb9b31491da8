"""What the whole house keeps: imports run one way, nothing forbidden is in the tree, `import plait` stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "plait": {"plait", "lang", "runtime"},
    "lang": {"lang", "runtime", "constrained"},
    "runtime": {"runtime", "constrained", "kernels"},
    "constrained": {"constrained"},
    "kernels": {"kernels"},
}
FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "np.load", "numpy.load"}


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def wrongs(source: str, room: str) -> list[str]:
    """What in `source` the house forbids."""
    tree, found = ast.parse(source), []
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] in FORBIDDEN_MODULES:
            found.append(f"imports {name}")
        if parts[0] == "plait" and len(parts) > 1 and parts[1] in MAY_IMPORT and parts[1] not in MAY_IMPORT[room]:
            found.append(f"imports {name} against the direction")
        if room == "lang" and parts[:2] == ["plait", "constrained"] and parts[2:3] != ["specs"]:
            found.append(f"imports {name}: the language only names constraints, through constrained.specs")
        if room in ("plait", "lang") and parts[0] in ("torch", "numba", "triton"):
            found.append(f"imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.append(f"calls {ast.unparse(node.func)}")
        if isinstance(node, ast.ExceptHandler) and [type(s) for s in node.body] == [ast.Pass]:
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in ("everything", "Exception", "BaseException"):
                found.append(f"swallows {caught}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_forbidden(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert wrongs(path.read_text(), room) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from plait.runtime import errors"),
        ("constrained", "import plait.runtime.errors"),
        ("lang", "import torch"),
        ("lang", "from plait.constrained.compile_service.pool import CompilePool"),
        ("runtime", "import pickle"),
        ("runtime", "x = eval('1')"),
        ("runtime", "import torch\ntorch.load('x')"),
        ("lang", "try:\n    x = 1\nexcept Exception:\n    pass"),
    ],
)
def test_the_check_itself_finds_what_it_should(room: str, source: str) -> None:
    assert wrongs(source, room)


def test_no_tcp_and_no_world_open_socket() -> None:
    for path in FILES:
        assert not re.search(r"tcp://|0\.0\.0\.0|AF_INET", path.read_text()), path


def test_import_plait_is_light() -> None:
    """And so is every name that starts no runtime and asks no service."""
    others = {"Anthropic", "Engine", "Graph", "LiteLLM", "OpenAI", "Runtime", "RuntimeEndpoint"}
    code = f"import sys, plait; [getattr(plait, name) for name in plait.__all__ if name not in {others}]"
    out = subprocess.run([sys.executable, "-c", f"{code}; print(*sys.modules)"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    heavy = {"torch", "numba", "transformers", "triton", "zmq", "tokenizers", "fastapi", "jinja2"}
    assert not heavy & set(out.stdout.split())


def test_what_starts_the_runtime_is_light() -> None:
    """`plait serve` begins the runtime process before it imports the server, its client and the tokenizer."""
    code = "import sys, plait.cli, plait.runtime.server.serve; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "zmq", "tokenizers", "uvicorn", "fastapi", "tqdm", "plait.runtime.client.client", "plait.lang"}
    assert not heavy & set(out.stdout.split())


def test_constraints_need_no_language() -> None:
    code = "import sys, plait.constrained; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in out.stdout.split() if name.startswith(("plait.lang", "plait.runtime"))]


def test_public_names_are_where_type_checkers_are_told() -> None:
    """The imports that only they read, the table that a program goes by, and `__all__` name the same."""
    import plait

    (told,) = (node for node in ast.parse(Path(plait.__file__).read_text()).body if isinstance(node, ast.If))
    imports = (node for node in told.body if isinstance(node, ast.ImportFrom))
    told_where = {name.name: node.module for node in imports for name in node.names}
    assert told_where == plait._MODULE_OF
    assert sorted(told_where) == plait.__all__ and set(plait.__all__) <= set(dir(plait))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018


def test_the_rooms_are_there_without_an_import_of_their_own() -> None:
    code = "import plait; print(plait.constrained.__name__, plait.runtime.__name__, plait.lang.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == ["plait.constrained", "plait.runtime", "plait.lang"], out.stderr


def test_packed_weights_go_without_torch() -> None:
    """It takes a second to load and 180 MB, more than all else in the runtime process together."""
    code = "import sys, plait.runtime.process.builder, plait.runtime.executor.packed_cpu_runner; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert not {"torch", "transformers", "scipy", "pydantic", "sympy"} & set(out.stdout.split())
