"""Project-wide rules: the direction of imports, no import circles, no crowded folder, nothing forbidden in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
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
# The rooms of runtime/, lowest first: a room imports itself and the rooms before it.
RUNTIME_ORDER = (
    *("arrays", "errors", "log_writer", "config", "sampling_params", "messages", "model_files", "tokenizer"),
    *("transport",),
    *("models", "weights", "kv_cache", "batch", "sampling", "executor", "scheduler", "client", "process", "server"),
)
CLIENT_MAY_IMPORT = {*RUNTIME_ORDER[: RUNTIME_ORDER.index("transport") + 1], "client"}  # it needs no model and no torch
MAX_FILES_IN_FOLDER = 16
FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "np.load", "numpy.load"}


def imported_names(tree: ast.AST) -> set[str]:
    """The dotted names that a module imports anywhere, those for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def direction_violations(name: str, importer: str) -> Iterator[str]:
    """What is wrong with `importer` (a dotted module of plait) importing `name`."""
    target, source = name.split("."), importer.split(".")
    if target[0] != "plait" or len(target) < 2 or target[1] not in MAY_IMPORT:
        return
    room = source[1] if len(source) > 1 and source[1] in MAY_IMPORT else "plait"
    if target[1] not in MAY_IMPORT[room]:
        yield f"imports {name} against the direction"
    if room == "lang" and target[1] == "constrained" and target[2:3] != ["specs"]:
        yield f"imports {name}: the language only names constraints, through constrained.specs"
    if room == target[1] == "runtime" and len(target) > 2 and len(source) > 2 and target[2] in RUNTIME_ORDER:
        if RUNTIME_ORDER.index(target[2]) > RUNTIME_ORDER.index(source[2]):
            yield f"imports {name} against the order of runtime/"
        if source[2] == "client" and target[2] not in CLIENT_MAY_IMPORT:
            yield f"imports {name}: the client runs without a model"


def violations(source: str, importer: str) -> list[str]:
    """What the project forbids and `source`, the text of the module `importer`, does."""
    tree, room = ast.parse(source), (importer.split(".") + [""])[1]
    problems: list[str] = []
    for name in imported_names(tree):
        top = name.split(".")[0]
        if top in FORBIDDEN_MODULES:
            problems.append(f"imports {name}")
        if room not in ("runtime", "constrained", "kernels") and top in ("torch", "numba", "triton"):
            problems.append(f"imports {name}")
        problems += direction_violations(name, importer)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            problems.append(f"calls {ast.unparse(node.func)}")
        if isinstance(node, ast.ExceptHandler) and [type(statement) for statement in node.body] == [ast.Pass]:
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in ("everything", "Exception", "BaseException"):
                problems.append(f"swallows {caught}")
    return problems


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "plait" else ("plait", *parts))


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Those of `modules` that the file imports when it is loaded or later; what is for type checkers only does not
    count.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = {name if name in modules else name.rpartition(".")[0] for name in imported_names(tree)}
    return found & modules - {module_name(path)}


def import_circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, from {module: modules it imports}."""
    modules = list(imports)
    reachable = {module: set(targets) for module, targets in imports.items()}
    for middle in modules:  # Warshall's transitive closure
        for module in modules:
            if middle in reachable[module]:
                reachable[module] |= reachable[middle]
    circles = {frozenset(m for m in modules if m in reachable[n] and n in reachable[m]) for n in modules}
    return [set(circle) for circle in circles if circle]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_rules(path: Path) -> None:
    assert violations(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("plait.kernels.x", "from plait.runtime import errors"),
        ("plait.constrained.x", "import plait.runtime.errors"),
        ("plait.lang.core.x", "import torch"),
        ("plait.cli", "import torch"),
        ("plait.lang.x", "from plait.constrained.compile_service.pool import CompilePool"),
        ("plait.runtime.batch.x", "from plait.runtime.scheduler.fairness import Fairness"),
        ("plait.runtime.executor.x", "from plait.runtime.scheduler import engine_loop"),
        ("plait.runtime.client.x", "from plait.runtime.executor.runner import Runner"),
        ("plait.runtime.x", "import pickle"),
        ("plait.runtime.server.x", "x = eval('1')"),
        ("plait.runtime.models.x", "import torch\ntorch.load('x')"),
        ("plait.lang.x", "try:\n    x = 1\nexcept Exception:\n    pass"),
    ],
)
def test_the_check_itself_finds_violations(importer: str, source: str) -> None:
    assert violations(source, importer)


def test_no_module_is_part_of_an_import_circle() -> None:
    modules = {module_name(path) for path in FILES}
    assert import_circles({module_name(path): imported_modules(path, modules) for path in FILES}) == []


def test_a_circle_is_found() -> None:
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_folder_is_crowded() -> None:
    folders: dict[Path, int] = {}
    for path in FILES:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_every_room_of_the_runtime_has_its_place_in_the_order() -> None:
    entries = {
        path.stem for path in (ROOT / "runtime").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert entries - {"__init__"} == set(RUNTIME_ORDER)


def test_no_tcp_and_no_world_open_socket() -> None:
    for path in FILES:
        assert not re.search(r"tcp://|0\.0\.0\.0|AF_INET", path.read_text()), path


def modules_after(code: str) -> set[str]:
    """Names of the modules that are loaded once `code` has run in a new process."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_plait_is_light() -> None:
    """And so is every public name that neither starts a runtime nor calls a service."""
    heavy_names = {"Anthropic", "Engine", "Graph", "LiteLLM", "OpenAI", "Runtime", "RuntimeEndpoint"}
    loaded = modules_after(
        f"import plait; [getattr(plait, name) for name in plait.__all__ if name not in {heavy_names}]"
    )
    assert not {"torch", "numba", "transformers", "triton", "zmq", "tokenizers", "fastapi", "jinja2"} & loaded


def test_what_starts_the_runtime_is_light() -> None:
    """`plait serve` starts the runtime process before it imports the server, its client and the tokenizer."""
    loaded = modules_after("import plait.cli, plait.runtime.server.serve")
    heavy = {"numpy", "zmq", "tokenizers", "uvicorn", "fastapi", "tqdm", "plait.runtime.client.client", "plait.lang"}
    assert not heavy & loaded


def test_constraints_need_no_language() -> None:
    loaded = modules_after("import plait.constrained")
    assert not [name for name in loaded if name.startswith(("plait.lang", "plait.runtime"))]


def test_packed_weights_run_without_torch() -> None:
    """torch takes a second to load and 180 MB, more than all else in the runtime process together."""
    loaded = modules_after("import plait.runtime.process.builder, plait.runtime.executor.packed_cpu_runner")
    assert not {"torch", "transformers", "scipy", "pydantic", "sympy"} & loaded


def test_public_names_are_where_type_checkers_look_for_them() -> None:
    """The imports for type checkers, the table for the running program and `__all__` name the same."""
    import plait

    (for_checkers,) = (node for node in ast.parse(Path(plait.__file__).read_text()).body if isinstance(node, ast.If))
    imports = (node for node in for_checkers.body if isinstance(node, ast.ImportFrom))
    module_of = {name.name: node.module for node in imports for name in node.names}
    assert module_of == plait._MODULE_OF
    assert sorted(module_of) == plait.__all__ and set(plait.__all__) <= set(dir(plait))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018


def test_the_rooms_are_there_without_an_import_of_their_own() -> None:
    code = "import plait; print(plait.constrained.__name__, plait.runtime.__name__, plait.lang.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["plait.constrained", "plait.runtime", "plait.lang"], done.stderr
