"""The installed package contains every module of the repository."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
FOLDERS = ("plait", "lang", "runtime", "constrained", "kernels")


def test_setup_lists_every_folder_with_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that lacks its `__init__.py` is missing from the packages."""
    arguments: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: arguments.update(keywords))
    runpy.run_path("setup.py")
    with_modules = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in with_modules}
    assert set(arguments["packages"]) == {name if name == "plait" else f"plait.{name}" for name in names}
