"""A wheel of this source tree runs a program where there is no source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("plait", "lang", "runtime", "constrained", "kernels", "host")
SOURCES = (*FOLDERS, ".path", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PROGRAM = """
import plait

@plait.function
def two(s):
    s += "One, two," + plait.gen("next", max_tokens=3, regex=" [a-z]+")

print(plait.__file__, two.run()["next"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build writes into the tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True, capture_output=True)
    (built,) = out.glob("plait-*.whl")
    return built


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    found = set(zipfile.ZipFile(wheel).namelist())
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    expected = {
        path if path.parts[0] == "plait" else "plait" / path for path in paths if "__pycache__" not in path.parts
    }
    assert {str(path) for path in expected} - found == set()
    assert not [name for name in found if name.startswith(("tests/", "benchmarks/", "docs/", ".path/"))]


def test_a_program_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own that sees the dependencies, but not the editable installation."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text(str(Path(msgspec.__file__).parents[1]))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([python, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    path, _, text = done.stdout.strip().partition(" ")
    assert Path(path).is_relative_to(packages) and text.strip().isalpha()
    command = [python, "-m", "plait.cli", "--version"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.startswith("plait ")
