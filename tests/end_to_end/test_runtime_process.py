"""Two processes: what crosses between them, and what each does when the other ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq

from plait.constrained import Choices, Regex
from plait.runtime.errors import (
    Aborted,
    CallRejected,
    ConstraintFailed,
    ContextOverflow,
    DeadlineExceeded,
    InputError,
    ModelNotFound,
    RuntimeGone,
)
from plait.runtime.messages import Select
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_server import FRAMES_SOCKET

LONG = sampling_params(max_tokens=4000, ignore_eos=True)


def opened(runtime, text="Once upon a time"):
    session = runtime.client.open_session()
    session.append(text)
    return session


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_killing_the_scheduler_fails_every_waiting_client_within_a_second():
    with Runtime(progress=False, max_pages=4000) as runtime:
        other = Runtime.connect(runtime.address)
        calls = [opened(r, f"Story {i}").generate(LONG) for i in range(10) for r in (runtime, other)]
        outcomes = []

        def read(call):
            try:
                outcomes.append(call.result())
            except RuntimeGone as error:
                outcomes.append((time.monotonic(), str(error)))

        threads = [threading.Thread(target=read, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        assert next(calls[0].iter_text())
        os.kill(runtime.pid, signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert len(outcomes) == len(calls)
        assert max(at for at, _ in outcomes) - killed < 1.0
        assert all("the runtime process ended" in why for _, why in outcomes)
        with pytest.raises(RuntimeGone):
            runtime.client.open_session()
        with pytest.raises(RuntimeGone):
            calls[0].result()
        other.shutdown()


def test_a_client_process_that_vanishes_frees_everything_within_two_seconds(runtime):
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
    assert wait_until(lambda: runtime.client.status().running_calls == 5, 10)
    child.kill()  # not yet reaped: a zombie counts as gone
    gone = wait_until(lambda: runtime.client.status().sessions == before.sessions, 2)
    child.wait()
    child.stdout.close()
    assert gone
    status = runtime.client.status()
    assert (status.running_calls, status.held_pages, status.clients) == (0, 0, before.clients)


def test_the_runtime_ends_with_its_owner():
    code = (
        "import os\nfrom plait.runtime.process.runtime import Runtime\nr = Runtime(progress=False, max_pages=500)\n"
        "print(r.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    assert wait_until(lambda: not psutil.pid_exists(pid), 10)


@pytest.mark.usefixtures("default_signals")
def test_a_term_signal_ends_an_idle_runtime():
    with Runtime(progress=False, max_pages=500) as runtime:
        call = opened(runtime).generate(sampling_params(max_tokens=2))
        call.result()
        os.kill(runtime.pid, signal.SIGTERM)
        assert wait_until(lambda: not psutil.pid_exists(runtime.pid) or runtime._process.poll() is not None, 5)
        with pytest.raises(RuntimeGone, match=r"the runtime process ended( \(exit code 0\))?$"):
            opened(runtime).generate(LONG).result()


def test_nobody_else_can_reach_the_sockets(runtime):
    assert stat.S_IMODE(os.stat(runtime.address).st_mode) == 0o700
    connections = psutil.Process(runtime.pid).net_connections(kind="inet")
    assert connections == []


def test_garbage_and_strangers_change_nothing(runtime):
    before = runtime.client.status().bad_frames
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{Path(runtime.address) / FRAMES_SOCKET}")
    for frame in (b"", b"\xff\xff", b"\x93\xa5Close\x01", os.urandom(2000), b"\xdd\xff\xff\xff\xff"):
        stranger.send(frame)
    stranger.send_multipart([b"a", b"b"])
    assert wait_until(lambda: runtime.client.status().bad_frames >= before + 6, 5)
    stranger.close(0)
    context.term()
    assert opened(runtime).generate(sampling_params(max_tokens=2)).result().finish_reason == "length"


def test_at_idle_the_scheduler_takes_no_cpu(runtime):
    assert wait_until(lambda: runtime.client.status().running_calls == 0, 10)
    process = psutil.Process(runtime.pid)
    time.sleep(0.3)
    before = sum(process.cpu_times()[:2])
    time.sleep(2.0)
    assert sum(process.cpu_times()[:2]) - before <= 0.02


def test_what_a_call_can_fail_of(runtime):
    with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.2 s"):
        opened(runtime).generate(sampling_params(max_tokens=4000, ignore_eos=True, timeout_s=0.2)).result()
    with pytest.raises(ContextOverflow, match="the context holds 8192"):
        opened(runtime, "word " * 9000).generate(LONG).result()
    with pytest.raises(ConstraintFailed):
        opened(runtime).generate(LONG, Regex("a(b")).result()
    call = opened(runtime).generate(LONG)
    assert next(call.iter_text())
    call.abort()
    with pytest.raises(Aborted):
        call.result()
    slow = opened(runtime).generate(LONG)
    with pytest.raises(DeadlineExceeded, match="the call goes on"):
        slow.result(timeout_s=0.05)
    slow.abort()
    with pytest.raises(Aborted):
        slow.result()
    session = opened(runtime)
    broken = session.generate(LONG, Regex("(("))
    later = session.generate(LONG)
    with pytest.raises(ConstraintFailed, match="cannot go on"):
        later.result()
    with pytest.raises(ConstraintFailed):
        broken.result()
    assert opened(runtime).generate(sampling_params(max_tokens=3)).result().usage.completion_tokens == 3


def test_values_are_checked_before_anything_is_sent(runtime):
    session = runtime.client.open_session()
    with pytest.raises(InputError, match="empty"):
        session.generate(LONG)
    session.append("x")
    for choices in ([], [""], ["a", "a"], "ab", [1]):
        with pytest.raises(InputError):
            session.select(choices)
    for size in (0, -1, True, 1.5, 10**9):
        with pytest.raises(InputError):
            session.fork(size)
    with pytest.raises(InputError, match="vocabulary"):
        session.generate(sampling_params(stop_token_ids=[10**6]))
    half = runtime.client.open_session()
    half.append("\ud800")
    with pytest.raises(InputError):
        half.generate(LONG)
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.append("more")


def test_constraints_are_enforced_across_the_link(runtime):
    session = opened(runtime, "My number is")
    call = session.generate(sampling_params(max_tokens=30, temperature=1.0), Regex(r" [0-9]{3}-[0-9]{4}"))
    result = call.result()
    assert (len(result.text), result.finish_reason) == (9, "stop")
    assert result.text[1:4].isdigit() and result.text[4] == "-"
    animal = session.generate(sampling_params(temperature=1.5), Choices((" cat", " catfish", " dog"))).result()
    assert animal.text in (" cat", " catfish", " dog")


def test_starting_fails_with_a_sentence_before_any_work(tmp_path):
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


def left_in(folder):
    return sorted(path.name for path in folder.glob("plait-*"))


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "os.kill(os.getpid(), 9)", "os._exit(0)", "1 / 0"])
def test_a_runtime_nobody_shut_down_leaves_no_directory(tmp_path, end):
    code = f"import os\nfrom plait.runtime.process.runtime import Runtime\nr = Runtime(progress=False, max_pages=100)\n{end}"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert wait_until(lambda: left_in(tmp_path) == [], 10)


def test_a_forked_child_is_told_and_its_parent_goes_on(runtime):
    code = (
        "import os, sys\nfrom plait.runtime.process.runtime import Runtime\nfrom plait.runtime.sampling_params import sampling_params\n"
        "r = Runtime(progress=False, max_pages=500)\n"
        "def ask():\n s = r.client.open_session(); s.append('a')\n"
        " return s.generate(sampling_params(max_tokens=2)).result()\n"
        "ask()\npid = os.fork()\n"
        "if not pid:\n"
        " try: ask()\n"
        " except Exception as e: print(type(e).__name__, e, flush=True)\n"
        " r.shutdown(); sys.exit(0)\n"
        "os.waitpid(pid, 0)\nprint(len(ask().token_ids), os.path.isdir(r.address))\nr.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    child, parent = done.stdout.splitlines()
    assert child.startswith("RuntimeGone this process was forked")
    assert parent == "2 True"


def test_a_stopped_runtime_cannot_hold_a_call_beyond_its_timeout():
    with Runtime(progress=False, max_pages=500) as runtime:
        call = opened(runtime).generate(sampling_params(max_tokens=400, ignore_eos=True, timeout_s=0.5))
        assert next(call.iter_text())
        os.kill(runtime.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match="did not answer"):
                call.result()
        finally:
            os.kill(runtime.pid, signal.SIGCONT)


def test_a_silent_runtime_is_given_up(monkeypatch):
    monkeypatch.setattr("plait.runtime.transport.zmq_client.POLL_S", 0.1)
    monkeypatch.setattr("plait.runtime.transport.zmq_client.SILENT_S", 7)
    with Runtime(progress=False, max_pages=500) as runtime:
        time.sleep(8)  # idle, but it answers when asked
        assert opened(runtime).generate(sampling_params(max_tokens=2)).result().token_ids
        call = opened(runtime).generate(LONG)
        assert next(call.iter_text())
        os.kill(runtime.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RuntimeGone, match="has not answered"):
                call.result()
        finally:
            os.kill(runtime.pid, signal.SIGCONT)


def test_settings_of_the_start_are_checked():
    for bad in ("x", -1, float("nan"), True):
        with pytest.raises(InputError, match="start_timeout_s"):
            Runtime(start_timeout_s=bad)


def test_a_program_may_do_something_while_the_process_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, seen = psutil.Process().children(), []

    def look():
        seen.extend(each for each in psutil.Process().children() if each not in [*before, *seen])
        assert left_in(tmp_path)

    with Runtime(progress=False, max_pages=100, meanwhile=look) as runtime:
        assert [each.pid for each in seen] == [runtime.pid]

    def fail():
        look()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Runtime(progress=False, max_pages=100, meanwhile=fail)
    assert len(seen) == 2 and not any(each.is_running() for each in seen) and left_in(tmp_path) == []


def test_a_start_that_takes_too_long_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeGone, match=r"did not start within 0\.01 s"):
        Runtime(progress=False, max_pages=100, start_timeout_s=0.01)
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("default_signals")
def test_a_runtime_that_is_told_to_end_while_it_loads_removes_its_directory(tmp_path):
    """With its owner, as `timeout` and systemd tell a whole group; only a runtime can do it then."""
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
    assert left_in(tmp_path)
    os.killpg(owner.pid, signal.SIGTERM)
    assert owner.wait() == -signal.SIGTERM
    owner.stdout.close()
    assert wait_until(lambda: not psutil.pid_exists(child), 30)
    assert left_in(tmp_path) == []


def test_a_request_that_does_not_decode_is_answered(runtime):
    session = opened(runtime)
    with pytest.raises(InputError, match="select method"):
        session.select([" a", " b"], method="nope")
    with pytest.raises(InputError, match="constraint"):
        session.generate(LONG, "abc")
    with pytest.raises(InputError, match="timeout_s"):
        session.select([" a", " b"], timeout_s="5")
    for wrong in ({"priority": 2**70}, {"priority": 1.5}, {"tenant": "\ud800"}, {"tenant": "x" * 1000}):
        with pytest.raises(InputError):
            runtime.client.open_session(**wrong)
    session._flush("gen")
    call = runtime.client.start_call(
        session.session_id, lambda call: Select(session.session_id, call, [[1]], "nope"), None
    )
    with pytest.raises(CallRejected, match="refused"):
        call.result(10)


def test_a_far_deadline_does_not_end_an_idle_runtime(runtime):
    result = opened(runtime).select([" a", " b"], timeout_s=604_000.0).result()
    assert result.choice is not None
    time.sleep(0.3)
    assert runtime.client.status().running_calls == 0
