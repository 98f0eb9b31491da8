"""What a 404 for a path without an endpoint says: the path, and the endpoint that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_PATH_CHARS = 100


def unknown_path_text(path: str, known: Iterable[str]) -> str:
    """Returns the message for `path`, which is none of the endpoints `known`.

    Most wrong paths come from a base URL with or without `/v1`.
    """
    shown = path[:MAX_PATH_CHARS]
    meant = _meant(shown, sorted((other for other in known if other != "/"), key=len))
    if meant is None:
        return f"there is no endpoint {shown!r}; GET /openapi.json lists all"
    return f"there is no endpoint {shown!r}; perhaps {meant} is meant{_base_url_hint(shown, meant)}"


def _meant(path: str, known: list[str]) -> str | None:
    for end in (path, path.removeprefix("/v1")):
        for other in known:
            if end.count("/") and other in (end, f"/v1{end}"):
                return other
    return next(iter(difflib.get_close_matches(path, known, n=1, cutoff=0.8)), None)


def _base_url_hint(path: str, meant: str) -> str:
    if meant == f"/v1{path}":
        return ": let the base URL of the client end with /v1"
    if path == f"/v1{meant}":
        return ": let the base URL of the client end without /v1"
    return ""
