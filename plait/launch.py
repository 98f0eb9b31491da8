"""The command `plait launch`: runs a coding agent on a server of its own, with settings in a folder of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from plait.coding_agents import CODING_AGENTS, CodingAgent, Served
from plait.host.child_process import ChildProcess, last_line
from plait.runtime.errors import InputError, PlaitError
from plait.runtime.server.engines.model_options import MODEL_OPTIONS
from plait.serve import KEY_VARIABLE, add_model_option

OPTIONS = [option for option in MODEL_OPTIONS.values() if option.name != "max-loras"]  # it has no adapters
OWNED = ".plait-launch"  # a file that marks a folder as one that this command has made, or found empty
END_TIMEOUT_S = 10.0  # for the server to end after the agent
FORWARDED = (signal.SIGTERM, signal.SIGHUP)  # to the agent


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plait launch`, which docs/agents.md explains."""
    parser.add_argument("agent", choices=CODING_AGENTS, metavar="AGENT", help=", ".join(CODING_AGENTS))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model of run")
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="MODEL, as in the other commands")
    text = "keeps the agent's settings and conversations there; default: a temporary folder, removed at the end"
    parser.add_argument("--folder", metavar="DIR", help=text)
    for option in OPTIONS:
        add_model_option(parser, option.name)


def launch_command(options: argparse.Namespace) -> int:
    """Runs the agent until it ends, and returns its exit code; 128 + n if signal n ended it.

    Raises InputError for an agent that is not installed, for a folder of other files and for a model whose context is
    too short, PlaitError if the server does not start.
    """
    agent = CODING_AGENTS[options.agent]
    if shutil.which(agent.command) is None:
        raise InputError(f"there is no program {agent.command}; install it with: {agent.install}")
    with _agent_folder(options) as folder, _server(options, folder) as server:
        return run_agent(agent, server, folder, options.arguments)


def run_agent(agent: CodingAgent, server: Served, folder: Path, arguments: Sequence[str]) -> int:
    """Runs the agent on `server` with its settings in `folder`, and says what it sets; see `launch_command`."""
    if server.context_length < agent.min_context:
        raise InputError(
            f"{agent.command} needs a context of {agent.min_context:,} tokens (the first prompt of {agent.measured} "
            f"has {agent.prompt_tokens:,}); {server.model} has {server.context_length:,}"
        )
    settings = agent.settings(server, folder)
    for path, text in settings.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        _say(f"wrote {path}")
    variables = {**settings.variables, **_without_proxy(os.environ)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(agent.removed or "\0")}
    for name in sorted(os.environ.keys() - environment.keys() - variables.keys()):
        _say(f"not passed on: {name}")
    for name, value in variables.items():
        _say(f"set {name}={'(the key of this server)' if value == server.key else value}")
    return _run([agent.command, *arguments], {**environment, **variables})


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep requests for this machine from a proxy; none without a proxy."""
    if not {name.lower() for name in environment} & {"http_proxy", "all_proxy"}:
        return {}
    hosts = [value for name in ("no_proxy", "NO_PROXY") if (value := environment.get(name))]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*hosts[:1], "127.0.0.1"]))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a program in the foreground until it ends. Ctrl-C, which a terminal sends to both, is for the program."""
    process = subprocess.Popen(command, env=environment)
    previous = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in FORWARDED}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _agent_folder(options: argparse.Namespace) -> Iterator[Path]:
    if options.folder is not None:
        folder = Path(options.folder).expanduser().resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / OWNED).exists() and any(folder.iterdir()):
            raise InputError(f"--folder: {folder} has files that plait launch did not write; name a new folder")
        (folder / OWNED).touch()
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f"plait-{options.agent}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _server(options: argparse.Namespace, folder: Path) -> Iterator[Served]:
    """Runs the server for the block. It takes no Ctrl-C, and ends with this process, however that ends."""
    key, log_path = secrets.token_urlsafe(32), folder / "server.log"
    arguments = [] if options.model is None else [options.model]
    for option in OPTIONS:
        value = getattr(options, option.dest)
        if value is not None and value is not False:
            arguments.append(f"--{option.name}" if value is True else f"--{option.name}={value}")
    _say(f"the server starts; its log is {log_path}")
    with log_path.open("wb") as log:
        pipe, environment = subprocess.PIPE, {**os.environ, KEY_VARIABLE: key}
        process = ChildProcess(
            "plait.owned_server", *arguments, stdout=pipe, stderr=log, env=environment, start_new_session=True
        )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().decode().split()[-1:]
        if not url:
            raise PlaitError(f"the server did not start: {last_line(log_path)}")
        yield _served(url[0], key)
    finally:
        process.end(END_TIMEOUT_S)


def _served(url: str, key: str) -> Served:
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        model = json.load(connection.getresponse())["data"][0]
    finally:
        connection.close()
    return Served(url, key, model["id"], model["max_model_len"])


def _say(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr, flush=True)
