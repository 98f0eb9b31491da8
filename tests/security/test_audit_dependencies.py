"""The verdict of `make audit`: it succeeds only if a database answered for every package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"name": "a", "version": "1", "vulns": []}
FOUND = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"], "description": ""}],
}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (3)"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "audit_dependencies", Path(__file__).with_name("audit_dependencies.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("outputs", "num_packages", "code", "phrase"),
    [
        ([[CLEAN]], 1, 0, "no known advisory for 1 packages"),
        ([[CLEAN, FOUND]], 2, 1, "b 2: PYSEC-1, CVE-1; fixed in 3"),
        ([[FOUND, SKIPPED]], 2, 1, "CVE-1"),
        ([[CLEAN, SKIPPED]], 2, 2, "audited 1 of 2 packages; no answer for c"),
        ([[CLEAN, SKIPPED], [CLEAN, CLEAN]], 2, 0, "no known advisory"),
        ([[SKIPPED]], 1, 2, "none of 1 packages was audited"),
        ([None, None], 105, 2, "no advisory database can be reached"),
        ([[CLEAN]], 2, 2, "audited 1 of 2"),
    ],
)
def test_the_verdict(audit: ModuleType, outputs: list, num_packages: int, code: int, phrase: str) -> None:
    texts = ["Traceback ..." if entries is None else json.dumps({"dependencies": entries}) for entries in outputs]
    found, text = audit.verdict([audit.read_report(output) for output in texts], num_packages)
    assert found == code and phrase in text, text


def test_all_pins_are_counted(audit: ModuleType) -> None:
    assert audit.count_pins("# a comment==1\nx==1\n\ny==2  # why\n") == 2
    assert audit.count_pins((ROOT / "constraints.txt").read_text()) > 90


def test_make_audit_pins_the_auditor_outside_of_the_environment_of_plait() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "AUDITOR := pip-audit==" in makefile and "AUDIT := .venv-audit" in makefile
    assert "pip-audit" not in (ROOT / "constraints.txt").read_text()
