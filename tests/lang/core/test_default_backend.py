"""Choice of the backend: the embedded runtime is started once, replaced after it died, and overridden by `backend=`."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from sample_programs import qa

import plait
from plait.runtime.messages import Generate

pytestmark = pytest.mark.timeout(120)


def test_threads_share_one_embedded_runtime_closed_at_exit(monkeypatch):
    import atexit

    from scripted_scheduler import ScriptedBackend

    import plait.lang.backends.default_backend as default_backend
    from plait.runtime.process import runtime as runtime_module

    started, at_exit = [], []

    def slow_runtime(**settings):
        time.sleep(0.05)
        started.append(settings)
        return ScriptedBackend()

    monkeypatch.setattr(runtime_module, "Runtime", slow_runtime)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(default_backend, "_embedded", None)
    monkeypatch.setattr(default_backend, "_embedded_settings", {})
    plait.set_default_backend(None)
    default_backend.configure_embedded(model_path=None, device="cpu")
    states = []
    threads = [threading.Thread(target=lambda: states.append(qa.run("q"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states += qa.run_batch([{"question": "q"}] * 2)
    assert [state["answer"] for state in states] == [" fine."] * 6
    assert started == [{"device": "cpu"}] and len(at_exit) == 1


def test_failed_start_of_the_runtime_is_not_a_program_error(monkeypatch):
    import plait.lang.backends.default_backend as default_backend
    from plait.runtime.process import runtime as runtime_module

    def no_model(**settings):
        raise plait.ModelNotFound("run: pip install a-model")

    monkeypatch.setattr(runtime_module, "Runtime", no_model)
    monkeypatch.setattr(default_backend, "_embedded", None)
    plait.set_default_backend(None)
    with pytest.raises(plait.ModelNotFound, match="pip install"):
        qa.run("q")


def test_run_uses_the_backend_argument(backend):
    from scripted_scheduler import ScriptedBackend

    other = ScriptedBackend()
    qa.run("q", backend=other)
    qa.run("q", backend=other.client)
    assert len(other.scheduler.sent(Generate)) == 2 and not backend.scheduler.requests


def test_dead_default_runtime_is_replaced(monkeypatch):
    from scripted_scheduler import ScriptedBackend

    import plait.lang.backends.default_backend as default_backend
    from plait.runtime.process import runtime as runtime_module

    started = []

    def runtime(**settings):
        started.append(ScriptedBackend())
        return started[-1]

    monkeypatch.setattr(runtime_module, "Runtime", runtime)
    monkeypatch.setattr(default_backend, "_embedded", None)
    plait.set_default_backend(None)
    qa.run("a")
    qa.run("a")
    assert len(started) == 1
    started[0].scheduler.die("killed")
    qa.run("a")
    assert len(started) == 2
    with pytest.raises(plait.ProgramError, match="killed"):
        qa.run("a", backend=started[0])
    assert len(started) == 2


def test_a_backend_without_capabilities_is_told_which():
    """A client that somebody wrote himself, for which the two flags are easily forgotten."""
    own = SimpleNamespace(open_session=lambda **_: None, next_id=lambda: 1, model=None, tokenizer=None)
    for use in (lambda: qa.run("q", backend=own), lambda: plait.set_default_backend(own)):
        with pytest.raises(plait.InputError, match=r"has no takes_following_text, no takes_token_ids; .*BackendClient"):
            use()
