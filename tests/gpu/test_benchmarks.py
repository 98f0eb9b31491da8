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


def test_the_engines_parts_share_a_process_and_failed_ones_are_tried_alone(tmp_path: Path) -> None:
    """`broken` stands in the first process' way alone."""
    code = (
        "import sys, runpy; sys.argv = ['all.py', '--dry', '--only', 'decode,kernels,json', '--out', sys.argv[1]]\n"
        "found = runpy.run_path('benchmarks/gpu/all.py')\n"
        "assert found['processes'](['attention', 'decode', 'kernels', 'json']) == "
        "[['attention'], ['decode', 'json'], ['kernels']]\n"
        "ran, main = [], found['main']\n"
        "def run(command, seconds, log):\n"
        "    ran.append([part for part in command if not part.endswith('.py')])\n"
        "    broken = len(ran) == 1\n"
        "    done = ['json'] if broken else []\n"
        "    state = 'FAILED' if broken else 'done'\n"
        "    return {'state': state, 'seconds': 1, 'figures': [], 'done': done, 'output': []}\n"
        "main.__globals__['run'] = run\n"
        "assert main() == 0\n"
        "assert ran == [['decode', 'json', '--dry'], ['decode', '--dry'], ['--dry']], ran\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", "--minutes", "0", "--only", "json,kernels"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "all.py --only json,kernels" in ran.stdout
