"""The constraints used last are compiled again after a restart; a file that is damaged or not private is ignored."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic, sleep

import pytest

from plait.constrained import Choices, CompilePool, Grammar, JsonSchema, Lark, Regex, Vocabulary, spec_file
from plait.constrained.spec_file import SpecFile

SPECS = [
    JsonSchema({"type": "object", "properties": {"a": {"pattern": "^a{3}$", "type": "string"}}}),
    Regex("(?=a)[ab]{2}"),
    Lark('start: "a"+'),
    Choices(("a", "b")),
]


def wait(pool: CompilePool, ready: list[int]) -> dict[int, object]:
    answers: dict[int, object] = {}
    give_up = monotonic() + 60
    while not answers.keys() >= set(ready) and monotonic() < give_up:
        answers.update(pool.collect())
        sleep(0.002)
    return answers


def test_constraints_are_compiled_again_after_a_restart(small: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "constraints"
    pool = CompilePool(small, spec_file=SpecFile(path))
    pool.start()
    tickets = [pool.submit(spec, "a") for spec in SPECS]
    answers = wait(pool, tickets)
    assert all(isinstance(answer, Grammar) for answer in answers.values())
    pool.submit(SPECS[0], "b")
    pool.close()
    assert path.stat().st_mode & 0o777 == 0o600 and [*tmp_path.iterdir()] == [path]

    pool = CompilePool(small, spec_file=SpecFile(path))
    pool.start()
    try:
        give_up = monotonic() + 60
        restored = list[int]()
        while len(pool.cache.grammars) < len(SPECS) and monotonic() < give_up:
            restored += [ticket for ticket, _ in pool.collect()]
            sleep(0.002)
        assert restored == [], "nobody asked for them"
        assert set(pool.cache.grammars.specs()) == set(SPECS)
        ticket = pool.submit(SPECS[1])
        ((answered, grammar),) = pool.collect()
        assert answered == ticket and isinstance(grammar, Grammar)
        matcher = grammar.matcher()
        assert not matcher.accept(small.ids_by_bytes[b"b"]) and matcher.accept(small.ids_by_bytes[b"a"])
    finally:
        pool.close()


def test_those_that_are_not_compiled_yet_are_kept(small: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "constraints"
    SpecFile(path).write(SPECS)
    pool = CompilePool(small, spec_file=SpecFile(path), start_eagerly=False)
    pool.start()
    pool.close()
    assert SpecFile(path).read() == SPECS


def test_the_most_recently_used_come_first_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpecFile(tmp_path / "constraints")
    file.write(SPECS)
    assert file.read() == SPECS
    monkeypatch.setattr(spec_file, "MAX_SPECS", 2)
    file.write(SPECS)
    assert file.read() == SPECS[:2]
    monkeypatch.setattr(spec_file, "MAX_BYTES", 1200)
    file.write([Regex("a" * 100), Regex("b" * 200)])
    assert file.read() == [Regex("a" * 100)] and file.path.stat().st_size <= 1200


def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path) -> None:
    file = SpecFile(tmp_path / "constraints")
    file.write(SPECS)
    good = file.path.read_bytes()
    for place in (0, 25, len(good) // 2, len(good) - 1):
        file.path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert SpecFile(file.path).read() == []
    for bad in (b"", good[:-1], good + b"x", good * 40_000):
        file.path.write_bytes(bad)
        assert SpecFile(file.path).read() == []
    SpecFile(file.path).write(SPECS[:1])
    assert SpecFile(file.path).read() == SPECS[:1]


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("plait is a language")
    file = SpecFile(path)
    assert file.read() == []
    file.write(SPECS)
    assert path.read_text() == "plait is a language" and [*tmp_path.iterdir()] == [path]
    assert "not a file of constraints" in caplog.text


def test_a_file_that_others_may_write_a_link_and_a_pipe_are_ignored(tmp_path: Path) -> None:
    file = SpecFile(tmp_path / "constraints")
    file.write(SPECS)
    (tmp_path / "link").symlink_to(file.path)
    os.mkfifo(tmp_path / "pipe")
    assert SpecFile(tmp_path / "link").read() == SpecFile(tmp_path / "pipe").read() == []
    file.path.chmod(0o620)
    assert SpecFile(file.path).read() == []
    SpecFile(tmp_path / "missing" / "constraints").write(SPECS)  # logged, not raised
