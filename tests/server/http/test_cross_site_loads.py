"""What a page of another site can make a browser load from here: pages that the user then sees, and nothing else."""

from __future__ import annotations

import pytest

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.hosts_and_origins import BrowserChecks
from plait.runtime.server.settings import server_settings


def refusal(method: str = "GET", path: str = "/status", **headers: str) -> str:
    """The error code of a request from another site to localhost without a key; "" if it is allowed."""
    fields = {"host": "localhost:30000", "sec_fetch_site": "cross-site"} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    try:
        checks = BrowserChecks(server_settings())
        checks.check({"type": "http", "method": method, "path": path, "headers": raw}, has_key=False)
    except ApiError as error:
        return error.code or ""
    return ""


def test_a_link_is_allowed() -> None:
    assert refusal(sec_fetch_mode="navigate", sec_fetch_dest="document") == ""
    assert refusal(sec_fetch_mode="navigate") == ""


@pytest.mark.parametrize("destination", ["iframe", "frame", "object", "embed", "fencedframe"])
def test_a_page_is_not_embedded(destination: str) -> None:
    """Frames navigate, too: a site could observe when they load, and how many frames they have."""
    assert refusal(sec_fetch_mode="navigate", sec_fetch_dest=destination) == "cross_origin"
    assert refusal(sec_fetch_mode="navigate", sec_fetch_dest=destination, sec_fetch_site="same-site") == "cross_origin"


@pytest.mark.parametrize("destination", ["script", "style", "image", "audio", "empty", "worker"])
@pytest.mark.parametrize("mode", ["no-cors", "cors", "websocket"])
def test_nothing_is_loaded_into_a_page(destination: str, mode: str) -> None:
    assert refusal(sec_fetch_mode=mode, sec_fetch_dest=destination) == "cross_origin"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_a_form_of_another_site_is_refused(method: str) -> None:
    assert refusal(method, sec_fetch_mode="navigate", sec_fetch_dest="document") == "cross_origin"
