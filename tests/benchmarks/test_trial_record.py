"""The trial record: killed and resumed runs add up to one complete run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trial_record import Record, code_stamp


def outcome(number):
    """(kind, how it failed, seconds, retractions) of a trial."""
    return f"kind {number % 3}", "differs" if number % 7 == 3 else "", 0.5, number % 2


def interrupted_run(record, first, count, max_trials):
    """A run that is killed after `max_trials` trials."""
    for done, number in enumerate(record.remaining("bf16", first, count)):
        if done == max_trials:
            return
        record.add("bf16", number, *outcome(number))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 15)), max_size=8))
def test_killed_runs_add_up_to_one_run(tmp_path_factory, runs):
    path, expected = tmp_path_factory.mktemp("record") / "trials.json", set()
    for first, count, max_trials in runs:
        record = Record(path, "code")
        interrupted_run(record, first, count, max_trials)
        expected |= set([n for n in range(first, first + count) if n not in expected][:max_trials])
    part = Record(path, "code").part("bf16")
    assert {n for first, end in part["done"] for n in range(first, end)} == expected
    assert len(part["done"]) == sum(n - 1 not in expected for n in expected), "adjacent ranges are joined"
    assert sum(part["kinds"].values()) == len(expected) == part["seconds"] / 0.5
    assert sorted(failure["trial"] for failure in part["failing"]) == [n for n in sorted(expected) if n % 7 == 3]
    assert part["retractions"] == sum(n % 2 for n in expected)


def test_parts_count_separately_and_a_trial_counts_once(tmp_path):
    record = Record(tmp_path / "trials.json", "code")
    record.add("bf16", 3, *outcome(3))
    record.add("as-stored", 3, *outcome(4))
    assert record.summary("bf16").startswith("1 of 1 trials differ: 3 (")
    assert record.summary("as-stored").startswith("0 of 1 trials differ (")
    with pytest.raises(AssertionError):
        record.add("bf16", 3, *outcome(3))
    assert [path.name for path in tmp_path.iterdir()] == ["trials.json"]
    assert json.loads((tmp_path / "trials.json").read_text())["parts"]["bf16"]["failing"][0]["trial"] == 3


def test_trials_of_other_code_are_rejected(tmp_path):
    source = tmp_path / "code"
    source.mkdir()
    (source / "a.py").write_text("1")
    before = code_stamp([source], True)
    Record(tmp_path / "trials.json", before).add("bf16", 0, *outcome(0))
    Record(tmp_path / "trials.json", code_stamp([source], True))
    (source / "a.py").write_text("2")
    for other in (code_stamp([source], True), code_stamp([source], False)):
        with pytest.raises(ValueError, match="other code"):
            Record(tmp_path / "trials.json", other)
