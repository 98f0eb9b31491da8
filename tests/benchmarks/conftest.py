"""Puts the benchmarks' own modules on the import path, here and in the scripts that the tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))


@pytest.fixture(autouse=True, scope="module")
def scripts_import_what_lies_beside_them() -> Iterator[None]:
    """PYTHONSAFEPATH, where the environment sets it, keeps a script's folder from the import path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONSAFEPATH", raising=False)
        yield
