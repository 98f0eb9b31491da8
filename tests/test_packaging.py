"""An installation has every module, is found from any folder, and only a known list of modules needs torch."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
FOLDERS = ("plait", "lang", "runtime", "constrained", "kernels")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
# Modules and packages (with a dot at the end) that import torch or triton when they are imported. Nothing that runs a
# model with packed weights on a CPU, serves it or checks it may be here.
NEED_TORCH = (
    *("plait.kernels.triton.", "plait.kernels.reference.", "plait.runtime.executor.gpu."),
    *(
        "plait.kernels.cpu.attention.torch_op",
        "plait.kernels.coded_weights",
        "plait.kernels.gguf_dequantize",
        "plait.kernels.kernel_selection",
    ),
    *("plait.kernels.kv_cache", "plait.kernels.layout", "plait.kernels.operators", "plait.kernels.quantized_weights"),
    *(
        "plait.kernels.device_weights",
        "plait.kernels.low_rank_table",
        "plait.kernels.sampling_inputs",
        "plait.runtime.executor.prefix_sharing",
        "plait.runtime.executor.torch_device",
    ),
    *("plait.runtime.adapters.torch_updates", "plait.runtime.executor.torch_runner"),
    *("plait.runtime.models.decoder", "plait.runtime.models.layers", "plait.runtime.sampling.torch_ops"),
    "plait.runtime.models.loading.torch_weights",
    *(
        "plait.runtime.executor.torch_inputs",
        "plait.runtime.executor.torch_outputs",
        "plait.runtime.executor.transformers_runner",
    ),
    *(f"plait.runtime.executor.distributed.{name}" for name in ("process_group", "rank_runner")),
    "plait.runtime.models.transformers_backend.model",
)
IMPORT_ALL_WITHOUT_TORCH = """
import importlib, json, sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing them raises ModuleNotFoundError
failed = []
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        failed.append(name)
print(json.dumps(failed))
"""


def module_names() -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return sorted(name if name.split(".")[0] == "plait" else f"plait.{name}" for name in names)


def is_known(module: str) -> bool:
    return any(module == known or (known.endswith(".") and module.startswith(known)) for known in NEED_TORCH)


def test_every_folder_with_modules_is_installed() -> None:
    """A folder that lacks its `__init__.py` is missing from the packages."""
    (where,) = SETTINGS["tool"]["setuptools"]["packages"]["find"]["where"]
    with_modules = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in with_modules}
    packages = {name if name.split(".")[0] == "plait" else f"plait.{name}" for name in names}
    assert set(find_packages(str(ROOT / where))) == packages


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """Python searches the folder of a script first, and there the clone `plait` looks like a namespace package."""
    (tmp_path / "plait").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import plait.batch, plait.lang.states.state\nprint(plait.Engine)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Engine" in done.stdout


def test_a_source_tree_without_its_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without symbolic links git writes files that hold their targets, and no package would be found in them."""
    (tmp_path / "plait").mkdir()
    for folder in FOLDERS[1:]:
        (tmp_path / "plait" / folder).write_text(f"../{folder}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"no folders \.path/plait/lang, .*/kernels: .*core\.symlinks=true"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_only_a_known_list_of_modules_needs_torch() -> None:
    command = [sys.executable, "-P", "-c", IMPORT_ALL_WITHOUT_TORCH]
    done = subprocess.run(command, input=json.dumps(module_names()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    need_torch = json.loads(done.stdout)
    assert [name for name in need_torch if not is_known(name)] == []
    missing = {known for known in NEED_TORCH if not any(name.startswith(known) for name in need_torch)}
    assert missing == set(), "these need torch no longer: remove them from the list"


def requirements(extra: str) -> set[str]:
    """The names of the packages of an extra, with those of the extras of plait that it names."""
    names = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(r"plait\[(.*)\]", requirement):
            names |= {name for part in own[1].split(",") for name in requirements(part)}
        else:
            names.add(re.split(r"[^\w-]", requirement)[0])
    return names


def test_torch_and_triton_are_extras() -> None:
    assert not [name for name in PROJECT["dependencies"] if name.startswith(("torch", "triton"))]
    assert requirements("torch") == {"torch"}
    assert requirements("gpu") == {"torch", "triton"}
    assert requirements("all") == {"torch", "triton", "transformers", "anthropic", "litellm", "mcp", "pyarrow"}
    assert requirements("ray") == {"ray", "pyarrow"}
    assert requirements("test") >= {"torch", "triton", "ray"} and "torch" in requirements("rag")


def test_install_commands_name_existing_extras() -> None:
    """In error messages, docstrings and pages."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in files for name in re.findall(r"(?:plait|\.)\[([\w,]+)\]'", path.read_text())}
    assert {"gpu", "torch", "mcp"} <= found
    assert {name for names in found for name in names.split(",")} <= set(PROJECT["optional-dependencies"])
