"""The hook that checks commit messages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[1] / ".ci" / "commit_message"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Subject\n\nWhy it is so.\n", ""),
        (f"{'é' * 72}\n\nWhy\n# a comment of git\n", ""),
        ("Merge branch 'x'\n", ""),
        (f"{'x' * 73}\n\nWhy\n", "the subject has 73 characters"),
        ("Subject.\n\nWhy\n", "ends with a full stop"),
        ("Subject\nWhy\n", "the line below the subject is not empty"),
        ("Subject\n\n# a comment of git\n", "there is no body"),
        ("", "the subject is empty"),
    ],
)
def test_messages_are_taken_or_refused(message: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "message"
    path.write_text(message)
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([HOOK, path], env=environment, capture_output=True, text=True)
    assert (done.returncode, reason in done.stderr) == (int(bool(reason)), True)
