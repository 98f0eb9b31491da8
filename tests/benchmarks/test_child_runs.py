"""The answers of child processes are read as they come, whatever the next item takes."""

from __future__ import annotations

import os
import time

from common import child_runs


def answer(item: object) -> object:
    if item == "late":
        time.sleep(60)
    if item == "wrong":
        raise ValueError(item)
    return item


def test_a_late_item_takes_no_answer_before_it_along(monkeypatch):
    fork = os.fork

    def fork_and_wait() -> int:
        child = fork()
        if child:
            time.sleep(0.3)  # several answers are in the pipe before the first is read
        return child

    monkeypatch.setattr(os, "fork", fork_and_wait)
    items = ["a", "b", "late", "wrong", "c"]
    assert child_runs.in_children(answer, items, 1.0) == ["a", "b", None, None, "c"]
