"""Rules for all files: the direction of imports, no import cycles, small folders, no forbidden calls."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "plait": {"plait", "lang", "runtime", "host"},
    "lang": {"lang", "runtime", "constrained", "host"},
    "runtime": {"runtime", "constrained", "kernels", "host"},
    "constrained": {"constrained", "host"},
    "kernels": {"kernels", "host"},
    "host": {"host"},
}
# The packages of runtime/, lowest first: a package imports itself and the packages before it.
RUNTIME_ORDER = (
    *(
        "arrays",
        "portable_error",
        "errors",
        "similar_names",
        "setting_errors",
        "torch_import",
        "log_writer",
        "config",
        "sampling_values",
        "sampling_table",
        "sampling_params",
        "seed_path",
        "call_reports",
        "messages",
        "results",
    ),
    *("model_files", "tokenizer", "chat", "transport"),
    *(
        "models",
        "weights",
        "adapters",
        "kv_cache",
        "drafts",
        "batch",
        "sampling",
        "executor",
        "scheduler",
        "client",
        "programs",
        "process",
    ),
    *("cluster", "server"),
)
CLIENT_MAY_IMPORT = {*RUNTIME_ORDER[: RUNTIME_ORDER.index("transport") + 1], "client"}  # without a model and torch
# The packages of runtime/server/, lowest first.
SERVER_ORDER = (
    *("fields", "http", "generation", "chat", "engines", "ops", "batches"),
    *("app_state", "rerun", "protocols", "app"),
)
MAX_FILES_IN_FOLDER = 16
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "np.load", "numpy.load"}
CALLED_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}  # the last part of each


def imported_names(tree: ast.AST) -> set[str]:
    """The dotted names that a module imports anywhere, also for type checkers."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_above(order: tuple[str, ...], *names: str) -> bool:
    """Whether the first of two names stands behind the second in `order`. False if `order` lacks one of them."""
    places = [order.index(name) for name in names if name in order]
    return len(places) == 2 and places[0] > places[1]


def direction_violations(name: str, importer: str) -> Iterator[str]:
    """The rules that `importer` (a dotted module of plait) violates by importing `name`."""
    target, source = name.split("."), importer.split(".")
    if target[0] != "plait" or len(target) < 2 or target[1] not in MAY_IMPORT:
        return
    package = source[1] if len(source) > 1 and source[1] in MAY_IMPORT else "plait"
    if target[1] not in MAY_IMPORT[package]:
        yield f"imports {name} against the direction"
    if package == "lang" and target[1] == "constrained" and target[2] not in ("specs", "captures", "tool_arguments"):
        yield f"imports {name}: the language uses constrained.specs, captures and tool_arguments only"
    if package == target[1] == "runtime" and len(target) > 2 and len(source) > 2 and target[2] in RUNTIME_ORDER:
        if is_above(RUNTIME_ORDER, target[2], source[2]):
            yield f"imports {name} against the order of runtime/"
        if source[2] == target[2] == "server" and is_above(SERVER_ORDER, *target[3:4], *source[3:4]):
            yield f"imports {name} against the order of runtime/server/"
        if source[2] == "client" and target[2] not in CLIENT_MAY_IMPORT:
            yield f"imports {name}: the client runs without a model"


def violations(source: str, importer: str) -> list[str]:
    """The rules that `source`, the code of the module `importer`, violates."""
    tree, package = ast.parse(source), (importer.split(".") + [""])[1]
    problems: list[str] = []
    for name in imported_names(tree):
        top = name.split(".")[0]
        if top in FORBIDDEN_MODULES:
            problems.append(f"imports {name}")
        if package not in ("runtime", "constrained", "kernels") and top in ("torch", "llvmlite", "triton"):
            problems.append(f"imports {name}")
        problems += direction_violations(name, importer)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLED_NAMES:
            problems += [f"calls {name}" for name in {ast.unparse(node.func)} & FORBIDDEN_CALLS]
        if isinstance(node, ast.ExceptHandler) and [type(statement) for statement in node.body] == [ast.Pass]:
            exception = ast.unparse(node.type) if node.type else "everything"
            if exception in ("everything", "Exception", "BaseException"):
                problems.append(f"swallows {exception}")
    return problems


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "plait" else ("plait", *parts))


@functools.cache
def imports_of_all() -> dict[str, set[str]]:
    """{module: modules of plait that it imports at any time, without imports for type checkers}."""
    modules = {module_name(path) for path in FILES}
    return {module_name(path): imported_modules(path, modules) for path in FILES}


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """The members of `modules` that the file imports at any time, without imports for type checkers."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    imported = {name if name in modules else name.rpartition(".")[0] for name in imported_names(tree)}
    return imported & modules - {module_name(path)}


def import_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, from {module: modules it imports}."""
    modules = list(imports)
    reachable = {module: set(targets) for module, targets in imports.items()}
    for middle in modules:  # Warshall's transitive closure
        for module in modules:
            if middle in reachable[module]:
                reachable[module] |= reachable[middle]
    cycles = {frozenset(m for m in modules if m in reachable[n] and n in reachable[m]) for n in modules}
    return [set(cycle) for cycle in cycles if cycle]


def test_no_file_violates_a_rule() -> None:
    found = {str(path.relative_to(ROOT)): violations(path.read_text(), module_name(path)) for path in FILES}
    assert len(found) > 500
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("plait.kernels.x", "from plait.runtime import errors"),
        ("plait.host.x", "from plait.kernels import layout"),
        ("plait.constrained.x", "import plait.runtime.errors"),
        ("plait.lang.core.x", "import torch"),
        ("plait.cli", "import torch"),
        ("plait.lang.x", "from plait.constrained.compile_service.pool import CompilePool"),
        ("plait.runtime.batch.x", "from plait.runtime.scheduler.policy.fairness import Fairness"),
        ("plait.runtime.executor.x", "from plait.runtime.scheduler import engine_loop"),
        ("plait.runtime.client.x", "from plait.runtime.executor.runner import Runner"),
        ("plait.runtime.server.http.x", "from plait.runtime.server.app_state import state_of"),
        ("plait.runtime.x", "import pickle"),
        ("plait.runtime.server.x", "x = eval('1')"),
        ("plait.runtime.models.x", "import torch\ntorch.load('x')"),
        ("plait.lang.x", "try:\n    x = 1\nexcept Exception:\n    pass"),
    ],
)
def test_violations_are_found(importer: str, source: str) -> None:
    assert violations(source, importer)


def test_there_are_no_import_cycles() -> None:
    assert import_cycles(imports_of_all()) == []


def test_import_cycles_are_found() -> None:
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def package_circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of siblings, modules or packages, that import each other, from {module: modules it imports}."""
    siblings: dict[str, dict[str, set[str]]] = {}
    for module, targets in imports.items():
        for target in targets:
            source, other = module.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(source, other, strict=False)) if a != b), 0)
            if depth:
                edges = siblings.setdefault(".".join(source[:depth]), {})
                edges.setdefault(".".join(other[: depth + 1]), set())
                edges.setdefault(".".join(source[: depth + 1]), set()).add(".".join(other[: depth + 1]))
    return {frozenset(circle) for edges in siblings.values() for circle in import_cycles(edges)}


def test_no_packages_import_each_other() -> None:
    """Of siblings, modules or packages, one imports the other: also by way of others."""
    assert [sorted(circle) for circle in package_circles(imports_of_all())] == []


def test_circles_of_packages_are_found() -> None:
    imports = {"p.a.x": {"p.b"}, "p.b": {"p.c.y"}, "p.c.y": {"p.a.z"}, "p.a.z": set(), "p.d": {"p.a.x"}}
    assert package_circles(imports) == {frozenset({"p.a", "p.b", "p.c"})}


def test_no_folder_has_more_than_16_files() -> None:
    folders: dict[Path, int] = {}
    for path in FILES:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_the_order_lists_every_package_of_the_runtime() -> None:
    entries = {
        path.stem for path in (ROOT / "runtime").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert entries - {"__init__"} == set(RUNTIME_ORDER)


def test_no_file_uses_tcp_or_inet_sockets() -> None:
    for path in FILES:
        assert not re.search(r"tcp://|0\.0\.0\.0|AF_INET", path.read_text()), path


def test_no_folder_has_the_name_of_a_public_function() -> None:
    """Importing `plait.system` as a package would replace the function `plait.system`."""
    assert not set(plait.__all__) & (set(MAY_IMPORT) - {"plait"})
