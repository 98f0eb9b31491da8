"""benchmarks/gpu/host_time.py: it runs the launches and replays of real steps, and what these take is in its figures.

Triton binds arguments and compiles for sm_90 here, in a process of its own; only the driver is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS, ROWS, CHUNK, STEPS = 3, 4, 16, 3
DELAY_MS = 5.0
PROBE = ROOT / "tests/support/kernels/host_time_probe.py"


def test_figures_hold_what_the_steps_launch_and_replay() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sizes = {"rows": ROWS, "chunk": CHUNK, "layers": LAYERS, "steps": STEPS}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    result = subprocess.run(
        [sys.executable, str(PROBE), *options],
        cwd=ROOT,
        env=environment | {"DELAY_MS": str(DELAY_MS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    decode_dispatched, decode, mixed_dispatched, mixed, compared = map(json.loads, result.stdout.splitlines())
    assert compared == {"compared": True}
    assert (decode["launches"], decode["replays"], decode_dispatched) == (0, 2, {"dispatched": 0})
    # The plan, and two kernels a layer; of these only the first layer's, and the plan, are dispatched by Triton.
    assert (mixed["launches"], mixed_dispatched) == (1 + 2 * LAYERS, {"dispatched": 3 * STEPS})
    assert mixed["replays"] == LAYERS + 1 + 2, "pieces, the logits and the sampler"
    for figure in (decode, mixed):
        assert figure["unit"] == "ms" and figure["fastest"] >= DELAY_MS * figure["replays"]
