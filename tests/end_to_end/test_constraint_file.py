"""`Runtime(constraint_file=...)`: the constraints of a runtime are there for the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.constrained import JsonSchema, Regex
from plait.constrained.spec_file import SpecFile
from plait.runtime.errors import InputError
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

SPECS = [Regex(r"\bno\b"), JsonSchema({"type": "string", "pattern": "^(?!a)[a-c]{2,3}$"})]


def test_constraints_outlive_the_runtime(tmp_path: Path) -> None:
    path = tmp_path / "constraints"
    with Runtime(constraint_file=path) as runtime:
        for spec in SPECS:
            session = runtime.client.open_session()
            session.append("Is it?")
            session.generate(sampling_params(max_tokens=1), spec).result()
            session.close()
    assert set(SpecFile(path).read()) == set(SPECS)
    with Runtime(constraint_file=path):
        pass  # it ends before it has compiled them, and keeps them nevertheless
    assert set(SpecFile(path).read()) == set(SPECS)


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(InputError, match="constraint_file"):
            Runtime(constraint_file=wrong)
