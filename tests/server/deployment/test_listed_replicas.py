"""Which replicas a listener hears of, when the list changes while it is added."""

from __future__ import annotations

import threading

from plait.runtime.server.deployment import listed_replicas


def test_a_listener_that_is_added_while_the_list_changes_hears_the_new_list_last(monkeypatch) -> None:
    monkeypatch.setattr(listed_replicas, "_listeners", [])
    monkeypatch.setattr(listed_replicas, "_listed", ["a"])
    heard: list[list[str]] = []
    change = threading.Thread(target=listed_replicas.tell_replicas, args=(["a", "b"],))

    def listener(ids) -> None:
        if not change.ident:
            change.start()
            change.join(0.2)  # without a lock it ends, and is heard before this one
        heard.append(list(ids))

    listed_replicas.listen_to_replicas(listener)
    change.join(20)
    assert heard == [["a"], ["a", "b"]]
