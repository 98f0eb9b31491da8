"""The agents of `make agents`, and a server whose model writes what a script says."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from asgi_server import serve_app
from scripted_model import TEMPLATE, scripted_engine
from tiny_llama_gguf import write_small_model

from plait.coding_agents import CODING_AGENTS, Served
from plait.launch import run_agent
from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.http.connection_limits import make_http_protocol
from plait.runtime.server.ops.request_log import REQUESTS
from plait.runtime.server.settings import server_settings

INSTALLED = Path(__file__).parents[2] / ".venv-agents"
CONTEXT_LENGTH = 65_536


class RequestLines(logging.Handler):
    """The fields of the requests that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[dict] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.fields)


def skip_unless_installed(name):
    if not os.environ.get("PLAIT_AGENTS"):
        pytest.skip("2026-11-27: only `make agents` runs agents, since it leaves them no network")
    if shutil.which(CODING_AGENTS[name].command) is None:
        pytest.skip(f"2026-11-27: {name} is not installed here; `make agents` installs it")


@contextlib.contextmanager
def logged_requests():
    log, lines = logging.getLogger(REQUESTS), RequestLines()
    log.addHandler(lines)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield lines.lines
    finally:
        log.setLevel(level)
        log.removeHandler(lines)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return write_small_model(
        tmp_path_factory.mktemp("models") / "scripted.gguf", context=CONTEXT_LENGTH, chat_template=TEMPLATE
    )


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with one file, where agents run, and a home without anything."""
    home, folder = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    folder.mkdir()
    (folder / "notes.txt").write_text("a line\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))  # which opencode takes for it
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith(("XDG_", "GIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{INSTALLED}/node_modules/.bin:{INSTALLED}/python/bin:{os.environ['PATH']}")
    return SimpleNamespace(folder=folder, home=home, agent_folder=tmp_path / "agent")


@pytest.fixture
def run(model_path, project, capfd):
    """`run(agent, script, *arguments, model="scripted")`: runs an agent as `plait launch` does, on the script's model.

    Returns the exit code, what the agent printed, and the fields of the requests' log lines.
    """

    def run(name, script, *arguments, model="scripted"):
        agent = CODING_AGENTS[name]
        skip_unless_installed(name)
        key = secrets.token_urlsafe(32)
        settings = server_settings(api_keys={"agent": digest(key.encode())}, model_name=model)
        with scripted_engine(model_path, script, compile_deadline_s=60) as engine, logged_requests() as requests:
            app = create_app(engine, settings)
            http = make_http_protocol(settings.idle_timeout_s, settings.write_timeout_s)
            with serve_app(app, http, settings.idle_timeout_s) as url:
                server = Served(url, key, model, engine.client.model.context_length)
                code = run_agent(agent, server, project.agent_folder, arguments)
        output = capfd.readouterr()
        return SimpleNamespace(code=code, output=output.out, errors=output.err, requests=requests)

    return run
