"""What an engine loop has built when it is ready."""

from __future__ import annotations

import threading

import pytest

from plait.runtime.config import EngineConfig
from plait.runtime.process import builder
from plait.runtime.process.idle_work import IdleWork
from plait.runtime.server.engines import start
from plait.runtime.server.settings import ServerSettings
from plait.runtime.transport.local import LocalServerTransport


@pytest.mark.parametrize("warm_constraints", [False, True])
def test_what_constraints_need_is_built_before_ready_if_wanted(small_model, monkeypatch, warm_constraints) -> None:
    built: list[tuple[str, str]] = []

    def pieces(vocabulary):
        names = [threading.current_thread().name]
        return [lambda build=build: (build(), built.append((names[0], "piece"))) for build in inner(vocabulary)]

    inner = builder.warm_up_pieces
    monkeypatch.setattr(builder, "warm_up_pieces", pieces)
    at_ready: list[int] = []
    loop = builder.build_engine_loop(
        EngineConfig(warm_constraints=warm_constraints),
        small_model,
        LocalServerTransport(),
        lambda fraction, doing: at_ready.append(len(built)) if doing == "ready" else None,
    )
    try:
        assert (not loop.compiler.builds.warm_up_pieces) == warm_constraints
        assert at_ready == [len(inner(loop.compiler.vocabulary)) if warm_constraints else 0]
        assert all(thread != threading.current_thread().name for thread, _ in built), "beside the weights"
        work = IdleWork(loop.compiler)
        work.go_on(is_busy=False)
        assert (not loop.compiler.builds.warm_up_pieces) == warm_constraints
    finally:
        loop.close()


def test_a_server_of_one_model_asks_for_it(monkeypatch) -> None:
    settings: list[bool] = []
    monkeypatch.setattr(start, "RestartingRuntime", lambda *_, **given: settings.append(given["warm_constraints"]))
    start.start_engine("model.gguf", ServerSettings(), {})
    start.start_engine("model.gguf", ServerSettings(), {}, name="one of several")
    start.start_engine("model.gguf", ServerSettings(), {"warm_constraints": False})
    assert settings == [True, False, False]
