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


@pytest.mark.parametrize("value", ["0", "nan", "-1", "40000"])
def test_a_wrong_amount_of_memory_is_refused(value, capsys):
    assert main(["serve", f"--kv-memory-gb={value}"]) == 1
    message = f"--kv-memory-gb must be greater than 0 and at most 32768, not {value}"
    assert message in capsys.readouterr().err


def test_an_unknown_type_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--kv-dtype=fp9"])
    assert "'auto', 'fp8', 'int8'" in capsys.readouterr().err
