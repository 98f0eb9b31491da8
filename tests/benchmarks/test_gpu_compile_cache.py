"""benchmarks/gpu/compile_cache.py: what it compiles is what a launch looks up in Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
ROOT = Path(__file__).parents[2]
LAUNCH = (
    "import sys; sys.path[:0] = ['benchmarks/gpu']\n"
    "import torch, no_driver\n"
    "from plait.kernels.triton import activation, norm\n"
    "def workload():\n"
    "    activation.silu_and_multiply(torch.zeros(3, 64, dtype=torch.bfloat16))\n"
    "    norm.rms_norm(torch.zeros(2, 80, dtype=torch.bfloat16), torch.zeros(80, dtype=torch.bfloat16), 1e-6)\n"
)
BLOCKED = (
    "import sys, importlib.util as util; find = util.find_spec\n"
    "util.find_spec = lambda name: None if name == 'torch' else find(name)\n"
)


def run_code(code: str, cache: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = kept | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / ".path")}
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-3000:]


def test_a_launch_finds_its_kernel(tmp_path: Path) -> None:
    file, carried = tmp_path / "launches.json", tmp_path / "carried"
    record = f"import compile_cache, pathlib; compile_cache.record(pathlib.Path({str(file)!r}), dict(w=workload))\n"
    run_code(LAUNCH + record, tmp_path / "none")
    recorded = json.loads(file.read_text())["launches"]
    assert [each["name"] for each in recorded] == ["_gated", "_rms_norm"]
    assert not (tmp_path / "none").exists(), "nothing is compiled while launches are recorded"
    compiled = f"sys.argv = ['x', 'compile', {str(file)!r}, {str(carried)!r}]; import compile_cache\n"
    without_torch = "compile_cache.main()\nassert '__file__' not in vars(sys.modules['torch']), 'torch was imported'\n"
    run_code(BLOCKED + "sys.path[:0] = ['benchmarks/gpu']\n" + compiled + without_torch, tmp_path / "none")
    before = sorted(carried.rglob("*"))
    assert len({path for path in before if path.is_dir()}) >= 2
    assert not [path for path in before if path.suffix == ".ptx"], "what is not loaded is not carried"
    run_code(LAUNCH + "no_driver.install_no_driver(); workload()\n", carried)
    assert sorted(carried.rglob("*")) == before, "a kernel was compiled again"
