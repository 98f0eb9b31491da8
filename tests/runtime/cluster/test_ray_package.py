"""Connections to Ray's clusters, with a Ray that only notes what it is told."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from plait.runtime.cluster.ray_package import connect
from plait.runtime.errors import RuntimeGone


class NotedRay:
    """Has what `connect` uses of the module ray. `started`: the settings of each start, and whether on loopback."""

    def __init__(self, found: str | None = None, error: Exception | None = None) -> None:
        self.started: list[tuple[dict[str, object], bool]] = []
        services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: found)
        constants = SimpleNamespace(ENABLE_RAY_CLUSTER=None)
        self._private, self._error = SimpleNamespace(services=services, ray_constants=constants), error

    def init(self, **settings: object) -> None:
        if self._error is not None:
            raise self._error
        self.started.append((settings, os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"))


def test_a_local_ray_starts_on_loopback_without_a_dashboard() -> None:
    ray = NotedRay(found="192.0.2.1:1")  # of another cluster, which is not asked
    connect(ray, "local", "", log_to_driver=False)
    settings = {"address": "local", "include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    assert ray.started == [(settings, True)]
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


def test_a_client_of_ray_connects_by_itself() -> None:
    ray = NotedRay(found="127.0.0.1:1")
    connect(ray, "ray://127.0.0.1:1", "")
    assert ray.started == [({"address": "ray://127.0.0.1:1", "logging_level": "error"}, False)]


@pytest.mark.parametrize(
    ("ray", "reason"),
    [
        (NotedRay(found="127.0.0.1:1"), "refused"),
        (NotedRay(error=ConnectionError("no file\nof an address")), r"no file$"),
        (NotedRay(error=ValueError()), r"ValueError$"),
    ],
    ids=["nothing listens", "the first line of a reason", "no reason"],
)
def test_a_cluster_that_is_not_there_is_reported_with_a_hint(ray: NotedRay, reason: str) -> None:
    with pytest.raises(RuntimeGone, match=rf"^there is no Ray cluster at 'auto'; start one: .*{reason}"):
        connect(ray, "auto", "; start one")
    assert ray.started == []
