"""The names that the package `plait` exports."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest

import plait


def test_every_public_name_can_be_imported():
    for name in plait.__all__:
        assert getattr(plait, name) is not None
    assert sorted(plait.__all__) == plait.__all__
    assert "map" in dir(plait) and plait.map is not map
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018


def test_a_star_import_hides_no_builtin():
    assert not [name for name in plait.__all__ if hasattr(builtins, name)]


def test_pages_for_users_import_public_modules_only():
    root = Path(__file__).parents[1]
    imported = set()
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        imported |= set(re.findall(r"^(?:from|import) (plait[\w.]*)", page.read_text(), re.MULTILINE))
    assert imported == {"plait", "plait.constrained", "plait.ray", "plait.testing"}
