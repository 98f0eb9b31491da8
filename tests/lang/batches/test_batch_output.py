"""The output of `plait batch` is killed before each write, and in the middle of it: the next run completes it."""

from __future__ import annotations

import contextlib
import json

import pytest
from killed_os import Killed, KilledOs

from plait.lang.batches.output import OutputFile, failed_result
from plait.runtime.results import result_file

ITEMS = {index: {"number": index} for index in (0, 1, 3, 4)}
IDENTITY = {"program": "p", "sampling keywords": "s"}


def run(path, order, failing=()) -> list[int]:
    """Runs the items that are left, in an order of their ends. Returns those that ran."""
    output = OutputFile(path, ITEMS, IDENTITY)
    ran = [index for index in order if index not in output.done]
    for index in ran:
        done = {"output": {"n": index}, "return": None, "error": None, "usage": None}
        output.add(index, failed_result("no") if index in failing else done)
    output.check_written()
    assert output.finish() == (4, len(failing))
    return ran


def test_a_kill_at_any_moment_loses_nothing_and_repeats_nothing(tmp_path, monkeypatch) -> None:
    def run_with_kill(number: int, num_operations: int) -> int:
        path, fake = tmp_path / f"{number}.jsonl", KilledOs(num_operations)
        run(path, [3, 0, 4, 1], failing=[4])  # the line of an error is replaced later
        before = {0, 1, 3}
        with monkeypatch.context() as patch:
            patch.setattr(result_file, "os", fake)
            with contextlib.suppress(Killed):
                run(path, [4])
            written = path.read_bytes().splitlines(keepends=True)
        whole = [json.loads(line) for line in written if line.endswith(b"\n")]
        done = {row["index"] for row in whole if row["error"] is None}
        assert before <= done
        assert run(path, [4]) == ([] if 4 in done else [4])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(row["index"], row["output"], row["error"]) for row in rows] == [(i, {"n": i}, None) for i in ITEMS]
        return fake.num_done

    total = run_with_kill(0, 1_000_000)
    assert total == 4  # the line; and the file in order: fsynced, replaced, and its name fsynced
    for number in range(1, total + 1):
        run_with_kill(number, number)


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_a_part_of_the_first_line_is_ours(tmp_path, length) -> None:
    path = tmp_path / "out.jsonl"
    run(path, [0, 1, 3, 4])
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first[:length])
    assert run(path, [0, 1, 3, 4])[-3:] == [1, 3, 4]
