"""The options of `plait serve` that set the runtime's memory and batches."""

from __future__ import annotations

import pytest

from plait.cli import main
from plait.runtime.server import serve as server


def engine_settings(monkeypatch, *options: str) -> dict:
    received = {}
    monkeypatch.setattr(server, "serve", lambda *arguments, **engine: received.update(engine) or 0)
    assert main(["serve", *options]) == 0
    return received


def test_options_reach_the_runtime(monkeypatch):
    options = ("--context-length=512", "--kv-dtype=int8", "--kv-memory-gb=0.5", "--max-batch-rows=3")
    engine = engine_settings(monkeypatch, *options)
    expected = {"context_length": 512, "kv_dtype": "int8", "kv_memory_bytes": 1 << 29, "max_batch_rows": 3}
    assert {name: engine[name] for name in expected} == expected
    assert not set(expected) & set(engine_settings(monkeypatch))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kv-memory-gb=0", "--kv-memory-gb must be greater than 0 and at most 32768, not 0"),
        ("--kv-memory-gb=nan", "not nan"),
        ("--kv-memory-gb=-1", "not -1"),
        ("--max-batch-rows=-1", "max_batch_rows"),
        ("--context-length=-5", "context_length"),
        ("--kv-memory-gb=0.0000001", "kv_memory_bytes"),
        ("--kv-dtype=fp8", "kv_dtype 'fp8' needs Triton's attention on a GPU; a CPU has 'int8'"),
    ],
)
def test_wrong_values_end_the_start_with_an_error(option, message, capfd):
    assert main(["serve", "--port=0", "--device=cpu", option]) == 1
    assert message in capfd.readouterr().err
