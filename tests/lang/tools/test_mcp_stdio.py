"""Tools of an MCP server that is a process, reached over stdio."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tool_examples
from tool_examples import script_call
from waiting import is_running

import plait
from plait import assistant, gen, user

COMMAND = [sys.executable, str(Path(tool_examples.__file__).with_name("mcp_numbers.py"))]
PATIENCE_S = 120


def number_server(**options):
    """The server. It finds the same packages as the tests."""
    return plait.MCPServer(
        COMMAND, env={"PYTHONPATH": os.pathsep.join(sys.path)}, connect_timeout=PATIENCE_S, **options
    )


@pytest.fixture(scope="module")
def numbers():
    with number_server(call_timeout=PATIENCE_S, prefix="n_") as server:
        yield server


@pytest.fixture(scope="module")
def functions(numbers):
    return {tool.name.removeprefix("n_"): tool.function for tool in numbers.tools}


@plait.function
def ask(s, tools):
    s += user("How many?") + assistant(gen("call", tools=tools))
    return s.call("call")


def test_tools_have_the_names_and_schemas_of_the_server(numbers):
    add = next(tool for tool in numbers.tools if tool.name == "n_add")
    assert add.description == "Adds two numbers." and add.parameters["required"] == ["a"]
    assert add.parameters["properties"]["b"]["default"] == 5
    assert len(numbers.tools) == 8 and numbers.tools is not numbers.tools


def test_call_runs_on_the_server_and_its_result_is_a_message(backend, numbers):
    script_call(backend, "n_add", a=4)
    state = ask.run(numbers.tools)
    assert state.ret_value.value == "9" and state.messages()[-1]["content"] == "Result of n_add: 9"


def test_error_of_a_tool_is_a_message(backend, numbers):
    script_call(backend, "n_fail")
    state = ask.run(numbers.tools)
    assert isinstance(state.ret_value.error, plait.ToolError)
    assert (
        state.messages()[-1]["content"] == "Result of n_fail: Error: ToolError: Error executing tool fail: no such town"
    )


def test_content_becomes_text(functions):
    assert functions["count"](text="aba") == '{\n  "a": 2,\n  "b": 1\n}'
    assert functions["mixed"]() == "one\n[image, image/png, not shown]\n[resource report: file:///r.txt]\ntwo"
    assert functions["long_text"]() == "x" * 100_000 + "\n[cut: 50000 more characters]"


def test_server_gets_the_environment_that_is_given(functions, monkeypatch):
    assert functions["environment"](name="PYTHONPATH") and not functions["environment"](name="PYTEST_CURRENT_TEST")


def test_server_that_dies_is_an_error_and_stays_one():
    with number_server(call_timeout=PATIENCE_S) as server:
        functions = {tool.name: tool.function for tool in server.tools}
        for name in ("die", "add"):
            with pytest.raises(plait.ToolError, match=r"the MCP server '.*mcp_numbers.py' has ended"):
                functions[name]()
    with pytest.raises(plait.ToolError, match=r"the connection to the MCP server .* is closed"):
        functions["add"](a=1)


def test_forked_process_does_not_use_the_connection(functions):
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            functions["add"](a=1)
        except plait.ToolError as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    assert "was connected by the process that forked this one" in os.read(readable, 1000).decode()
    os.waitpid(child, 0)


def test_command_that_is_no_server_is_an_error():
    with pytest.raises(
        plait.ToolError, match=r"cannot connect to the MCP server '\S*true': MCPError: Connection closed"
    ):
        _ = plait.MCPServer(["true"], connect_timeout=PATIENCE_S).tools
    server = plait.MCPServer(["sleep", "600"], connect_timeout=0.5)
    for _ in range(2):
        with pytest.raises(
            plait.ToolError, match=r"sleep 600' (did not answer within connect_timeout=0.5 s|is closed)"
        ):
            _ = server.tools
    server.close()
    assert not server._connection._thread.is_alive()


PROGRAM = """
import sys, threading, time, pathlib, plait
pid_file = pathlib.Path(sys.argv[1])
script = f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 1; done"  # SIGTERM does not end it
server = plait.MCPServer(["sh", "-c", script], connect_timeout=600)
threading.Thread(target=lambda: server.tools, daemon=True).start()
while not pid_file.exists() or not pid_file.read_text().endswith("\\n"):
    time.sleep(0.02)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
def test_server_ends_with_the_program(tmp_path, is_killed):
    pid_file, script = tmp_path / "pid", tmp_path / "program.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "-P", script, pid_file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "started\n"
    server = int(pid_file.read_text())
    if is_killed:
        program.send_signal(signal.SIGKILL)
    program.communicate(timeout=PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while is_running(server) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(server)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plait.MCPServer("python server.py"), "a command as a list, or a URL that begins with http"),
        (lambda: plait.MCPServer([]), "a command as a list of texts, or a URL"),
        (lambda: plait.MCPServer(["no-such-program"]), "there is no program 'no-such-program'"),
        (lambda: plait.MCPServer(["true"], headers={"a": "b"}), "headers has no effect with a command"),
        (lambda: plait.MCPServer("http://x", env={"a": "b"}), "env has no effect with a URL"),
        (lambda: plait.MCPServer("http://x", cwd="/"), "cwd has no effect with a URL"),
        (lambda: plait.MCPServer(["true"], connect_timeout=0), "connect_timeout must be a number of seconds above 0"),
        (lambda: plait.MCPServer(["true"], call_timeout="1"), "call_timeout must be a number of seconds above 0"),
        (lambda: plait.MCPServer(["true"], prefix=1), "prefix must be text"),
    ],
)
def test_wrong_argument_is_an_input_error(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(plait.InputError, match=r"MCPServer needs the package mcp: pip install 'plait\[mcp\]'"):
        plait.MCPServer(["true"])
