"""benchmarks/gpu/all.py without a GPU: a dry run, its processes, and its report."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_reports_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", "--only", "decode", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    [(name, part)] = json.loads((tmp_path / "gpu.json").read_text())["parts"].items()
    assert (name, part["state"]) == ("decode", "done")
    figures = {figure["name"].split(":")[1].strip(): figure["value"] for figure in part["figures"]}
    assert figures.keys() == {"share of the memory roofline", "output", "between graphs"}
    assert figures["output"] > 0 and math.isfinite(figures["between graphs"])
    assert (tmp_path / "decode.log").read_text().splitlines() == part["output"]


def test_parts_that_use_an_engine_share_a_process_and_are_retried_after_a_failure(tmp_path: Path) -> None:
    """The first process fails after `json`, so `decode` runs again in another process."""
    code = (
        "import sys, runpy; sys.argv = ['all.py', '--dry', '--only', 'decode,kernels,json', '--out', sys.argv[1]]\n"
        "names = runpy.run_path('benchmarks/gpu/all.py')\n"
        "assert names['processes'](['attention', 'decode', 'kernels', 'json']) == "
        "[['attention'], ['decode', 'json'], ['kernels']]\n"
        "commands, main = [], names['main']\n"
        "def run(command, seconds, log):\n"
        "    commands.append([part for part in command if not part.endswith('.py')])\n"
        "    fails = len(commands) == 1\n"
        "    done = ['json'] if fails else []\n"
        "    state = 'FAILED' if fails else 'done'\n"
        "    return {'state': state, 'seconds': 1, 'figures': [], 'done': done, 'output': []}\n"
        "main.__globals__['run'] = run\n"
        "assert main() == 0\n"
        "assert commands == [['decode', 'json', '--dry'], ['decode', '--dry'], ['--dry']], commands\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_parts_beyond_the_time_limit_are_listed(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", "--minutes", "0", "--only", "json,kernels"]
    result = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "all.py --only json,kernels" in result.stdout
