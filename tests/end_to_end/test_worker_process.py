"""The runtime process: its arguments, its environment, its import path, and signals to a process group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from runtime_helpers import open_session
from waiting import wait_until

from plait.runtime.process.runtime import Runtime, environment_without_secrets
from plait.runtime.sampling_params import sampling_params

pytestmark = pytest.mark.usefixtures("starts_small_model")
WORKER = [sys.executable, "-P", "-m", "plait.runtime.process.worker"]


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{}\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"1" * 2_000_000, b'{"config": 3}\n', b"\x00\n"],
)
def test_anything_but_a_line_of_arguments_is_reported(line):
    done = subprocess.run(WORKER, input=line, capture_output=True, timeout=200, check=False)
    status = json.loads(done.stdout)
    assert done.returncode == 2 and status["error"] == "InputError" and "standard input" in status["text"]
    assert b"Traceback" not in done.stderr


def test_names_of_secrets(monkeypatch):
    secrets = ("PLAIT_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "TOKEN")
    kept = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "OMP_NUM_THREADS", "KEY_FILE_DIR")
    for name in (*secrets, *kept):
        monkeypatch.setenv(name, "1")
    environment = environment_without_secrets()
    assert not environment.keys() & set(secrets)
    assert set(kept) <= environment.keys()


def test_no_secret_reaches_the_runtime_and_no_module_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_API_KEY", "secret-of-the-owner")
    monkeypatch.chdir(tmp_path)
    for name in ("msgspec", "numpy", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the current folder was imported')")
    with Runtime(progress=False, max_pages=100) as runtime:
        environ = psutil.Process(runtime.pid).environ()
    assert "PLAIT_API_KEY" not in environ and "secret-of-the-owner" not in environ.values()


@pytest.mark.usefixtures("default_signals")
def test_signals_to_the_process_group_leave_the_runtime_to_its_owner():
    """As systemd, `timeout` and a terminal signal a server that then finishes its requests."""
    code = (
        "import signal, sys\nfrom plait.runtime.process.runtime import Runtime\n"
        "from plait.runtime.sampling_params import sampling_params\n"
        "for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, lambda *a: None)\n"
        "r = Runtime(progress=False, max_pages=500)\n"
        "def generate():\n s = r.client.open_session(); s.append('a')\n"
        " return s.generate(sampling_params(max_tokens=400, ignore_eos=True))\n"
        "call = generate()\nprint(r.pid, flush=True)\nsys.stdin.readline()\n"
        "print(len(call.result().token_ids), len(generate().result().token_ids), flush=True)\nr.shutdown()"
    )
    pipe = subprocess.PIPE
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=pipe, stdout=pipe, start_new_session=True, text=True
    )
    pid = int(owner.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(owner.pid, number)
    output, _ = owner.communicate("\n", timeout=120)
    assert output.split() == ["400", "400"]
    assert wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.usefixtures("default_signals")
def test_sigterm_to_the_runtime_alone_is_ignored():
    with Runtime(progress=False, max_pages=500) as runtime:
        os.kill(runtime.pid, signal.SIGTERM)
        result = open_session(runtime).generate(sampling_params(max_tokens=2)).result()
        assert len(result.token_ids) == 2
    assert wait_until(lambda: not psutil.pid_exists(runtime.pid))
