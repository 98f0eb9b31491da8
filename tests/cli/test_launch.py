"""`plait launch`: the agent is a script that tells what it was given; the server is a real one of a small model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import psutil
import pytest
from tiny_llama_gguf import write_small_model
from waiting import is_running, wait_until

from plait.cli import main
from plait.coding_agents import CODING_AGENTS, Served
from plait.launch import run_agent
from plait.runtime.errors import InputError

AGENT = """#!{python}
import json, os, signal, sys, time
taken = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)]
json.dump([sys.argv[1:], dict(os.environ), os.getpid(), taken], open("{report}.part", "w"))
os.rename("{report}.part", "{report}")
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "--wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    time.sleep(600)
sys.exit(3)
"""
SERVER = Served("http://127.0.0.1:9", "the-key", 'a "model" of Zoë', 32_768)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "small.gguf", context=32_768)


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """A folder on the path with a program for each agent. Returns the file that has what the program was given."""
    report, folder = tmp_path / "report.json", tmp_path / "bin"
    folder.mkdir()
    for name in CODING_AGENTS:
        (folder / name).write_text(AGENT.format(python=sys.executable, report=report))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return report


@pytest.fixture
def launched(agents, model, tmp_path):
    """`launched(*arguments)` starts the command, and returns its process and what its agent was given."""
    processes = []
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits SIG_IGN

    def launch(*arguments):
        command = [sys.executable, "-P", "-m", "plait.cli", "launch", "codex", str(model), *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert wait_until(lambda: agents.exists() or process.poll() is not None)
        return process, *json.loads(agents.read_text())

    yield launch
    signal.signal(signal.SIGINT, interrupt)
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(processes):
    return wait_until(lambda: not any(is_running(one.pid) for one in processes))


def test_the_agent_has_a_server_with_a_key_of_its_own(launched) -> None:
    process, arguments, environment, _, ignored = launched("--", "--wait", "--model", "x", "--")
    assert arguments == ["--wait", "--model", "x", "--"] and ignored == [False, False]
    home = Path(environment["CODEX_HOME"])
    log, config = home.parent / "server.log", tomllib.loads((home / "config.toml").read_text())
    url = config["model_providers"]["plait"]["base_url"]
    headers = {"authorization": f"Bearer {environment['PLAIT_API_KEY']}"}
    (served,) = httpx.get(f"{url}/models", headers=headers).json()["data"]
    assert config["model"] == served["id"] == "small"
    assert config["model_context_window"] == served["max_model_len"] == 32_768
    assert httpx.get(f"{url}/models").status_code == 401
    assert wait_until(lambda: "GET /v1/models 401" in log.read_text())
    running = descendants(process)
    process.send_signal(signal.SIGINT)  # a terminal sends it to the agent, too, which need not end
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5  # the agent's
    assert are_gone(running) and not home.parent.exists()
    said = process.stderr.read()
    assert environment["PLAIT_API_KEY"] not in said
    for line in (f"the server starts; its log is {log}", f"wrote {home}/config.toml", f"set CODEX_HOME={home}"):
        assert f"plait: {line}\n" in said


def test_the_server_ends_when_the_command_is_killed_and_a_folder_is_kept(launched, tmp_path) -> None:
    folder = tmp_path / "kept" / "here"
    process, *_, pid, _ = launched("--folder", str(folder), "--context-length", "16384", "--", "--wait")
    assert "model_context_window = 16384" in (folder / "codex" / "config.toml").read_text()
    servers = [one for one in descendants(process) if one.pid != pid]
    assert len(servers) >= 2  # the server, its runtime and the processes of that
    process.kill()
    assert are_gone(servers)
    os.kill(pid, signal.SIGKILL)
    assert (folder / "server.log").exists() and folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_other_files_is_refused(agents, model, tmp_path, capfd) -> None:
    config = tmp_path / "mine" / "config.toml"
    config.parent.mkdir()
    config.write_text("mine")
    assert main(["launch", "codex", str(model), "--folder", str(config.parent)]) == 1
    assert "did not write" in capfd.readouterr().err
    assert config.read_text() == "mine" and not agents.exists()


def test_an_agent_that_was_killed(agents, tmp_path) -> None:
    assert run_agent(CODING_AGENTS["codex"], SERVER, tmp_path, ["--die"]) == 128 + signal.SIGKILL


def test_a_context_that_is_too_short(agents, model, capfd) -> None:
    assert main(["launch", "claude", str(model), "--context-length", "8192"]) == 1
    text = capfd.readouterr().err
    assert re.search(r"claude needs a context of [\d,]+ tokens .*; small has 8,192", text)
    assert not agents.exists()


def test_a_server_that_does_not_start(agents, tmp_path, capfd) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and nothing else")
    assert main(["launch", "codex", str(tmp_path / "bad.gguf")]) == 1
    assert "the server did not start: plait: " in capfd.readouterr().err


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_an_agent_that_is_not_installed(name, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["launch", name]) == 1
    text = capsys.readouterr().err
    assert f"there is no program {name}; install it with: " in text and CODING_AGENTS[name].install in text


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_settings(name, agents, tmp_path, monkeypatch, capfd) -> None:
    """The agent is led to the server and its model, and nothing of it lies in the user's home."""
    strangers = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "OPENCODE_CONFIG_CONTENT", "OPENAI_API_TYPE")
    for variable in (*strangers, "OTHER"):
        monkeypatch.setenv(variable, "elsewhere")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example")
    monkeypatch.setenv("no_proxy", "intranet")
    agent, folder = CODING_AGENTS[name], tmp_path / "agent"
    assert run_agent(agent, SERVER, folder, []) == 3
    _, environment, _, _ = json.loads(agents.read_text())
    passed = {variable for variable in strangers if variable in environment}
    assert not any(variable.startswith(agent.removed) for variable in passed if agent.removed)
    assert environment["OTHER"] == "elsewhere" and environment["NO_PROXY"] == "intranet,127.0.0.1"
    settings = agent.settings(SERVER, folder)
    assert settings.variables.items() <= environment.items()
    assert all(path.is_relative_to(folder) and SERVER.key not in text for path, text in settings.files.items())
    texts = [*settings.variables.values(), *settings.files.values()]
    assert SERVER.key in texts and any(SERVER.url in text for text in texts)
    names = (SERVER.model, *(json.dumps(SERVER.model, ensure_ascii=ascii)[1:-1] for ascii in (True, False)))
    assert any(name in text for name in names for text in texts)
    said = capfd.readouterr().err
    assert SERVER.key not in said
    for variable in (*settings.variables, *settings.files):
        assert re.search(rf"plait: (set|wrote) {re.escape(str(variable))}\b", said)
    assert not (tmp_path / "home").exists()


def test_a_context_of_just_the_size(agents, tmp_path) -> None:
    agent = CODING_AGENTS["aider"]
    server = Served(SERVER.url, SERVER.key, "m", agent.min_context)
    assert run_agent(agent, server, tmp_path, []) == 3
    with pytest.raises(InputError, match=f"needs a context of {agent.min_context:,} tokens"):
        run_agent(agent, Served(SERVER.url, SERVER.key, "m", agent.min_context - 1), tmp_path, [])


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_the_page_has_the_table(name) -> None:
    agent, page = CODING_AGENTS[name], (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    title, _, version = agent.measured.rpartition(" ")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{title}]")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1] == version and cells[3:] == [f"{agent.prompt_tokens:,}", f"{agent.min_context:,}"]
    assert f"`{agent.install}`" in page
