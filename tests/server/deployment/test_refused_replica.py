"""A replica with other model files than the first one gets no requests; an ingress with only such ones gives up."""

from __future__ import annotations

import asyncio
import shutil
import threading
from types import SimpleNamespace

import msgspec
import pytest
from local_replicas import local_replicas
from tiny_llama_gguf import write_small_model
from waiting import wait_until

from plait.runtime.errors import RuntimeGone
from plait.runtime.server.deployment.listed_replicas import tell_replicas
from plait.runtime.server.graceful_shutdown import GracefulServer


def ingress_of(kind):
    """An ingress that is not started. Its module imports Ray Serve, not needed to collect the tests."""
    from plait.runtime.server.deployment import ingress

    return object.__new__(getattr(ingress, kind))


def test_a_replica_with_other_model_files_is_refused(small_model, tmp_path) -> None:
    other = write_small_model(tmp_path / "other.gguf", context=4096)
    shutil.copy(small_model, tmp_path / "model.gguf")
    with local_replicas(str(tmp_path / "model.gguf"), {"c": str(other)}, ("a", "c"), max_pages=2000) as replicas:
        assert wait_until(lambda: "refused" in replicas.states())
        answers = [replicas.ask(f"A tale of {number} boats:") for number in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert sorted(replicas.placed()) == [0, 4]
        (refused,) = (record.id for record in replicas.directory._replicas.values() if record.refusal is not None)
        (served,) = {"a", "c"} - {refused}
        ingress = ingress_of("ProxiedIngress")
        ingress._directory = replicas.directory
        assert not replicas.directory.has_given_up
        asyncio.run(ingress.check_health())
        tell_replicas([refused])  # as after an update to another model
        replicas.runtimes[served].shutdown()
        assert wait_until(lambda: replicas.directory.has_given_up)
        with pytest.raises(RuntimeGone):  # Ray Serve replaces it
            asyncio.run(ingress.check_health())


def test_a_replica_with_another_chat_template_or_adapter_is_refused(small_model) -> None:
    """As while an update of the setting replaces replicas: the ingress writes all prompts by one template."""
    with local_replicas(str(small_model), {}, ("a",), max_pages=2000) as replicas:
        served = replicas.directory.client.model
        welcome = msgspec.structs.replace(served, chat_template="{{ messages }}")
        assert "another chat template" in (asyncio.run(replicas.directory._refusal(welcome)) or "")
        welcome = msgspec.structs.replace(served, adapters={"sql": "00"})
        assert "other adapters" in (asyncio.run(replicas.directory._refusal(welcome)) or "")
        assert asyncio.run(replicas.directory._refusal(served)) is None


def test_an_ingress_whose_server_has_ended_leaves_without_an_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    ingress = ingress_of("ListeningIngress")
    ingress._has_ended, ingress._server = asyncio.Event(), GracefulServer.__new__(GracefulServer)
    ingress._has_ended.set()
    ingress._server._loop = loop
    assert asyncio.run(ingress.__del__())


def test_an_ingress_whose_event_loop_stands_still_is_not_healthy() -> None:
    loop, is_over = asyncio.new_event_loop(), threading.Event()
    ingress = ingress_of("ListeningIngress")
    ingress._has_ended, ingress._server_loop, ingress._directory = asyncio.Event(), loop, None
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run(ingress.check_health())
    loop.call_soon_threadsafe(is_over.wait, 60)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(ingress.check_health(), 0.1))
    is_over.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("kind", ["ListeningIngress", "ProxiedIngress"])
def test_an_ingress_that_can_use_no_replica_is_not_healthy(kind) -> None:
    """It goes on to answer until Ray Serve replaces it."""

    async def check() -> None:
        ingress = ingress_of(kind)
        ingress._has_ended, ingress._server_loop = asyncio.Event(), asyncio.get_running_loop()
        ingress._directory = SimpleNamespace(has_given_up=False)
        await ingress.check_health()
        ingress._directory.has_given_up = True
        with pytest.raises(RuntimeGone, match="another model or chat template"):
            await ingress.check_health()

    asyncio.run(check())
