"""The benchmark of the GPU runs as far as it can without one: its code, its log and its report."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_reports_what_it_would_measure(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", "--only", "decode", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    [(name, part)] = json.loads((tmp_path / "gpu.json").read_text())["parts"].items()
    assert (name, part["state"]) == ("decode", "done")
    found = {figure["name"].split(":")[1].strip(): figure["value"] for figure in part["figures"]}
    assert found.keys() == {"share of the memory roofline", "output", "between graphs"}
    assert found["output"] > 0 and math.isfinite(found["between graphs"])
    assert (tmp_path / "decode.log").read_text().splitlines() == part["output"]


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", "--minutes", "0", "--only", "json,kernels"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "all.py --only json,kernels" in ran.stdout
