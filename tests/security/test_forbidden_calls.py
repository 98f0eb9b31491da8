"""No file of the repository loads code from data: benchmarks, examples, documentation scripts and tests included.

`tests/test_import_rules.py` has further rules for the packages of plait.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_NAMES = {"eval", "exec"}
FORBIDDEN_ATTRIBUTES = {"torch.load", "yaml.load", "np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle"}
CALLED_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_NAMES | FORBIDDEN_ATTRIBUTES}  # the last part of each
FORBIDDEN_ARGUMENTS = {"trust_remote_code", "allow_pickle"}
NAMED = re.compile(rf"\b({'|'.join(sorted(FORBIDDEN_MODULES | CALLED_NAMES | FORBIDDEN_ARGUMENTS))})\b")


def source_files() -> list[Path]:
    """All Python files outside of hidden folders and build folders."""
    return sorted(
        path
        for path in ROOT.rglob("*.py")
        if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
    )


def findings(source: str) -> Iterator[str]:
    """What `source` imports or calls that could run code from data. A file without one of the names is not parsed."""
    if not NAMED.search(unicodedata.normalize("NFKC", source)):  # as Python reads names
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            modules = []
        for module in modules:
            if module.partition(".")[0] in FORBIDDEN_MODULES or module in FORBIDDEN_ATTRIBUTES:
                yield f"imports {module}"
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLED_NAMES:
                name = ast.unparse(node.func)
                if name.removeprefix("builtins.") in FORBIDDEN_NAMES or name in FORBIDDEN_ATTRIBUTES:
                    yield f"calls {name}"
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_ARGUMENTS and not is_false:
                    yield f"passes {keyword.arg}"


def test_no_file_loads_code_from_data() -> None:
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text("utf-8"))) for path in source_files()}
    assert len(found) > 1000
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_every_folder_is_searched() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in source_files()}
    product = {"constrained", "kernels", "lang", "plait", "runtime"}
    assert {"benchmarks", "docs", "examples", "tests"} | product <= folders


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import dill.detect", "from torch import load"),
        *("eval('1')", "builtins.exec('x')", "torch.load('x')", "np.load('x')"),
        *("ｅｖａｌ('1')", "AutoModel.from_pretrained('x', trust_remote_code=True)", "f(allow_pickle=flag)"),
    ],
)  # fmt: skip
def test_forbidden_calls_are_found(source: str) -> None:
    assert list(findings(source))
