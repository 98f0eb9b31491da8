"""What a real model achieves in each agent: printed, and not judged. PLAIT_TEST_MODEL names the model.

The answers depend on the model, so nothing of them is asserted, only that the agent's requests reached the server and
that it failed on none; on a CPU the first prompts take minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

MODEL = os.environ.get("PLAIT_TEST_MODEL")
PROMPT = "Which files are here? Use a tool to list them."
ARGUMENTS = {
    "claude": ("-p", PROMPT, "--allowedTools", "Bash(ls:*)", "Glob"),
    "codex": ("exec", "--skip-git-repo-check", PROMPT),
    "opencode": ("run", PROMPT),
    "aider": ("--no-git", "--yes-always", "--message", "Add the line: the end", "notes.txt"),
}


@pytest.mark.skipif(not MODEL, reason="2026-11-27: no PLAIT_TEST_MODEL, so no report of a real model")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_requests_of_the_agent_are_answered(name, project, capfd) -> None:
    command = [sys.executable, "-P", "-m", "plait.cli", "launch", name, str(MODEL)]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--folder", str(project.agent_folder), "--", *ARGUMENTS[name]], capture_output=True, text=True
    )
    log = (project.agent_folder / "server.log").read_text().splitlines()
    with capfd.disabled():
        print(f"\n{name}: exit code {done.returncode}, {time.monotonic() - start:.0f} s")
        print(*[f"  {line}" for line in log if " POST " in line or " ERROR " in line], sep="\n")
        print(*[f"  | {line}" for line in done.stdout.splitlines()[-20:]], sep="\n")
        print(*[f"  ! {line}" for line in done.stderr.splitlines() if not line.startswith("plait: ")][-10:], sep="\n")
    assert any(" POST " in line for line in log)
    assert not [line for line in log if " ERROR " in line]
