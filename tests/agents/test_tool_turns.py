"""Claude Code, Codex, opencode and aider, unchanged: each does one turn with a tool on a server of ours."""

from __future__ import annotations

import json
import subprocess

import pytest

PROMPT = "Which files are here?"
FINAL = "There is one file, notes.txt."
TITLE = '{"title": "Files here"}'
CALLS = {
    "Bash": {"command": "ls", "description": "List files"},
    "exec_command": {"cmd": "ls"},
    "bash": {"command": "ls"},
}
ARGUMENTS = {
    "claude": ("-p", PROMPT, "--allowedTools", "Bash"),
    "codex": ("exec", "--skip-git-repo-check", PROMPT),
    "opencode": ("run", PROMPT),
}
PATCH = """*** Begin Patch
*** Update File: notes.txt
@@
-a line
+another line
*** End Patch
"""


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result(prompt: str) -> str | None:
    """The result of the last call of this turn; None before it."""
    _, mark, text = prompt.rpartition(PROMPT)[2].rpartition("<tool_response>")
    return text if mark else None


def list_files(prompt: str) -> str:
    """A title where there are no tools; then a call that lists the files; then the answer, once it has the result."""
    tool = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
    if tool is None:
        return TITLE
    if (files := result(prompt)) is None:
        return call(tool, CALLS[tool])
    assert "notes.txt" in files
    return FINAL


def assert_cached(requests: list[dict]) -> None:
    """All requests succeeded, and nine tenths of the second turn's prompt were in the cache."""
    assert {line["status"] for line in requests} == {200}
    _, second = [line for line in requests if line.get("prompt_tokens", 0) > 2000]  # titles have less
    assert second["cached_tokens"] >= 0.9 * second["prompt_tokens"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_tool_turn(run, project, name) -> None:
    done = run(name, list_files, *ARGUMENTS[name])
    assert done.code == 0, done.errors
    assert FINAL in done.output
    assert_cached(done.requests)
    assert {path.name for path in project.home.iterdir()} <= {".cache"}  # where opencode keeps programs


def test_codex_patches_a_file_with_a_custom_tool(run, project) -> None:
    """Under a name that Codex knows, it offers its own tool, whose input follows a grammar instead of a schema."""

    def script(prompt: str) -> str:
        if (patched := result(prompt)) is None:
            return call("apply_patch", {"input": PATCH})
        assert "Success" in patched
        return FINAL

    sandbox = ("--sandbox", "danger-full-access")
    done = run("codex", script, "exec", "--skip-git-repo-check", *sandbox, PROMPT, model="gpt-5.5")
    assert done.code == 0, done.errors
    assert (project.folder / "notes.txt").read_text() == "another line\n"
    assert_cached(done.requests)


def test_aider_edits_a_file_without_tools(run, project) -> None:
    for arguments in (("init", "-q"), ("config", "user.name", "A"), ("config", "user.email", "a@example.org")):
        subprocess.run(["git", *arguments], check=True)

    def script(prompt: str) -> str:
        return "notes.txt\n```\nanother line\n```" if "*file listing*" in prompt else "Change the line"

    done = run("aider", script, "--yes-always", "--message", "Change the line.", "notes.txt")
    assert done.code == 0, done.errors
    assert (project.folder / "notes.txt").read_text() == "another line\n"
    assert {line["status"] for line in done.requests} == {200}
    assert "Change the line" in subprocess.run(["git", "log", "-1"], capture_output=True, text=True).stdout
