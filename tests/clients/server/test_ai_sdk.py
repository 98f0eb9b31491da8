"""The ai SDK of npm: runs ai_sdk/ai_sdk.test.mjs with Node's own test runner."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "ai_sdk"


def test_ai_sdk(address, embedder) -> None:
    variables = {"ADDRESS": address, "EMBEDDER": embedder, "AI_SDK_LOG_WARNINGS": "false"}
    result = subprocess.run(
        ["node", "--test", "ai_sdk.test.mjs"],
        cwd=FOLDER,
        env=os.environ | variables,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
