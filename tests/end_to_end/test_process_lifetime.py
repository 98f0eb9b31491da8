"""The lifetime of the runtime process: start, end of owner or client, signals, forks, and its directory."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from runtime_helpers import LONG, open_session
from waiting import is_running, wait_until

from plait.runtime.errors import (
    InputError,
    ModelNotFound,
    RuntimeGone,
)
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

pytestmark = pytest.mark.usefixtures("starts_small_model")


def test_sessions_of_a_killed_client_are_dropped(runtime):
    before = runtime.client.status()
    code = (
        "import sys, time\nfrom plait.runtime.process.runtime import Runtime\n"
        "from plait.runtime.sampling_params import sampling_params\n"
        "r = Runtime.connect(sys.argv[1])\nkeep = []\n"
        "for i in range(5):\n s = r.client.open_session(); s.append('hello'); keep.append(s)\n"
        " s.generate(sampling_params(max_tokens=4000, ignore_eos=True))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, runtime.address], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert wait_until(lambda: runtime.client.status().running_calls == 5)
    child.kill()  # the sessions must be dropped before the zombie is reaped
    are_dropped = wait_until(lambda: runtime.client.status().sessions <= before.sessions)
    child.wait()
    child.stdout.close()
    assert are_dropped
    status = runtime.client.status()
    assert (status.running_calls, status.used_pages, status.clients) == (0, 0, before.clients)


def test_the_runtime_exits_when_its_owner_is_killed():
    code = (
        "import os\nfrom plait.runtime.process.runtime import Runtime\nr = Runtime(progress=False, max_pages=500)\n"
        "print(r.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    assert wait_until(lambda: not is_running(pid))


def test_a_killed_runtime_fails_its_calls():
    with Runtime(progress=False, max_pages=500) as runtime:
        call = open_session(runtime).generate(sampling_params(max_tokens=2))
        call.result()
        os.kill(runtime.pid, signal.SIGKILL)
        with pytest.raises(RuntimeGone, match=r"the runtime process ended( \(killed by signal 9\))?"):
            open_session(runtime).generate(LONG).result()


def test_other_users_cannot_reach_the_sockets(runtime):
    assert stat.S_IMODE(os.stat(runtime.address).st_mode) == 0o700
    connections = psutil.Process(runtime.pid).net_connections(kind="inet")
    assert connections == []


def test_an_idle_scheduler_uses_no_cpu_time(runtime):
    """In most intervals; a busy machine may delay what it does after its last call."""
    assert wait_until(lambda: runtime.client.status().running_calls == 0)
    process = psutil.Process(runtime.pid)

    def cpu_seconds_of_two():
        before = sum(process.cpu_times()[:2])
        time.sleep(2.0)
        return sum(process.cpu_times()[:2]) - before

    assert any(cpu_seconds_of_two() <= 0.02 for _ in range(5))


def test_invalid_settings_and_models_raise_when_the_runtime_starts(tmp_path):
    with pytest.raises(InputError, match="max_batch_row"):
        Runtime(max_batch_row=3)
    with pytest.raises(InputError, match="device"):
        Runtime(device="quantum", progress=False)
    with pytest.raises(ModelNotFound):
        Runtime(str(tmp_path / "none.gguf"))
    with pytest.raises(InputError, match="kv_memory_bytes"):
        Runtime(kv_memory_bytes=1000, progress=False)
    with pytest.raises(RuntimeGone, match="no runtime answers"):
        Runtime.connect(str(tmp_path))
    assert not list(tmp_path.iterdir())


def runtime_directories(folder):
    return sorted(path.name for path in folder.glob("plait-*"))


def test_runtimes_without_shutdown_leave_no_directory(tmp_path):
    """Their programs run side by side."""
    start = "import os\nfrom plait.runtime.process.runtime import Runtime\nr = Runtime(progress=False, max_pages=100)\n"
    start += "print(len(os.listdir(os.environ['TMPDIR'])), flush=True)\n"
    programs = {}
    for number, end in enumerate(["", "os.kill(os.getpid(), 9)", "os._exit(0)", "1 / 0"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, "-c", start + end]
        programs[end] = folder, subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.DEVNULL)
    for end, (folder, program) in programs.items():
        made, _ = program.communicate(timeout=100)
        assert int(made) >= 1, end
        assert wait_until(lambda folder=folder: runtime_directories(folder) == []), end


def test_a_forked_child_raises_runtime_gone_and_its_parent_continues(runtime):
    code = (
        "import os, sys\nfrom plait.runtime.process.runtime import Runtime\n"
        "from plait.runtime.sampling_params import sampling_params\n"
        "r = Runtime(progress=False, max_pages=500)\n"
        "def generate():\n s = r.client.open_session(); s.append('a')\n"
        " return s.generate(sampling_params(max_tokens=2)).result()\n"
        "generate()\npid = os.fork()\n"
        "if not pid:\n"
        " try: generate()\n"
        " except Exception as e: print(type(e).__name__, e, flush=True)\n"
        " r.shutdown(); sys.exit(0)\n"
        "os.waitpid(pid, 0)\nprint(len(generate().token_ids), os.path.isdir(r.address))\nr.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    child, parent = done.stdout.splitlines()
    assert child.startswith("RuntimeGone this process was forked")
    assert parent == "2 True"


def test_invalid_start_timeouts_raise_input_error():
    for timeout_s in ("x", -1, float("nan"), True):
        with pytest.raises(InputError, match="start_timeout_s"):
            Runtime(start_timeout_s=timeout_s)


def test_meanwhile_runs_while_the_process_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children_before, workers = psutil.Process().children(), []

    def record_worker():
        known = [*children_before, *workers]
        workers.extend(child for child in psutil.Process().children() if child not in known)
        assert runtime_directories(tmp_path)

    with Runtime(progress=False, max_pages=100, meanwhile=record_worker) as runtime:
        assert [worker.pid for worker in workers] == [runtime.pid]

    def fail():
        record_worker()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Runtime(progress=False, max_pages=100, meanwhile=fail)
    assert (
        len(workers) == 2 and not any(worker.is_running() for worker in workers) and runtime_directories(tmp_path) == []
    )


def test_a_start_beyond_its_timeout_raises_runtime_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeGone, match=r"did not start within 0\.01 s"):
        Runtime(progress=False, max_pages=100, start_timeout_s=0.01)
    assert runtime_directories(tmp_path) == []


@pytest.mark.usefixtures("default_signals")
def test_a_runtime_removes_its_directory_after_sigterm_while_loading(tmp_path):
    """The owner gets the signal, too, as `timeout` and systemd signal a whole process group, and removes nothing."""
    code = (
        "import psutil, time\nfrom pathlib import Path\nfrom plait.runtime.process.runtime import Runtime\n"
        "def loads():\n"
        " (child,) = psutil.Process().children()\n"
        " while 'numpy' not in Path(f'/proc/{child.pid}/maps').read_text(): time.sleep(0.001)\n"
        " print(child.pid, flush=True)\n time.sleep(60)\n"
        "Runtime(progress=False, max_pages=100, meanwhile=loads)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    assert runtime_directories(tmp_path)
    os.killpg(owner.pid, signal.SIGTERM)
    assert owner.wait() == -signal.SIGTERM
    owner.stdout.close()
    assert wait_until(lambda: not is_running(child))
    assert runtime_directories(tmp_path) == []
