"""Refuses requests that a page of another site makes a browser send, by their Host, Origin and Sec-Fetch headers.

- Host: a page whose DNS name is changed to this server's address (DNS rebinding) still sends its own name. IP
  addresses, loopback names, the name given to --host and those given to --allowed-host are allowed. A request with a
  valid key may have any Host, since such a page has no key; so may /health and /ready, for probes use any name.
- Origin: where there is one, it must be this server's own or allowed by --cors-origin.
- Sec-Fetch-Site without an Origin: another site may only link here, not load or embed anything. Browsers send these
  headers to HTTPS and to loopback addresses only; over plain HTTP to another machine such a GET passes, unread.
- A GET that changes or computes something must not come from a browser at all, nor a body without a content type
  where one is read: a page can send an untyped blob without asking first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from plait.runtime.server.errors import ApiError
from plait.runtime.server.settings import ServerSettings

PROBED_PATHS = frozenset({"/health", "/ready"})
NO_BROWSER_GETS = frozenset({"/flush_cache", "/health_generate"})
PERMISSION_ERROR = "permission_error"
DEFAULT_PORTS = {"http": 80, "https": 443}


class BrowserChecks:
    """The checks of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._origins = settings.cors_origins
        names = (settings.host, *settings.allowed_hosts)
        self._host_names = frozenset(_normalized_name(name) for name in names)
        self._allows_all_hosts = "*" in settings.allowed_hosts

    def check(self, scope: Scope, *, has_key: bool) -> None:
        """Raises ApiError 403 for a refused request. `has_key`: it was authenticated with an API key."""
        hosts = _values(scope, b"host")
        if not has_key and scope["path"] not in PROBED_PATHS:
            for host in hosts:
                self._check_host(host)
        origins = _values(scope, b"origin")
        for origin in origins:
            if not self._is_allowed_origin(origin, hosts):
                raise _cross_origin()
        if not origins:
            self._check_fetch_metadata(scope)
        if scope["method"] in ("GET", "HEAD") and scope["path"] in NO_BROWSER_GETS and is_from_browser(scope):
            text = "a browser may only POST to this path"
            raise ApiError(403, text, type=PERMISSION_ERROR, code="cross_origin")

    def _check_host(self, host: str) -> None:
        if self._allows_all_hosts or _is_allowed_host(host, self._host_names):
            return
        text = f"the host '{host[:100]}' is not allowed; the server's operator can allow it with --allowed-host"
        raise ApiError(403, text, type=PERMISSION_ERROR, code="host_not_allowed")

    def _is_allowed_origin(self, origin: str, hosts: Collection[str]) -> bool:
        return "*" in self._origins or origin in self._origins or _is_own_origin(origin, hosts)

    def _check_fetch_metadata(self, scope: Scope) -> None:
        """Checks Sec-Fetch-Site of a request without an Origin: other sites may only open a page here, not embed it."""
        site = _values(scope, b"sec-fetch-site")
        if set(site) <= {"same-origin", "none"} or "*" in self._origins:
            return
        opens_page = _values(scope, b"sec-fetch-mode") == ["navigate"]  # so does a frame, an object or an embed
        opens_page &= set(_values(scope, b"sec-fetch-dest")) <= {"document"}
        if scope["method"] != "GET" or not opens_page:
            raise _cross_origin()


def _is_own_origin(origin: str, hosts: Collection[str]) -> bool:
    """Whether `origin` names the host and port that the request was sent to. A proxy may have ended its TLS."""
    scheme, separator, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if not separator or port is None or len(hosts) != 1:
        return False
    own = [f"//{authority}", *(f"//{host}" for host in hosts)]
    try:
        parts = [(part.hostname, part.port or port) for part in map(urlsplit, own)]
    except ValueError:  # a port that is not a number, or a wrong IPv6 address
        return False
    return parts[0] == parts[1]


def _is_allowed_host(host: str, allowed_names: Collection[str]) -> bool:
    """Whether a Host header is an IP address, a loopback name, or one of `allowed_names`, with any port.

    >>> [_is_allowed_host(host, {"api.example"}) for host in ("localhost:80", "[::1]", "api.example", "evil.example")]
    [True, True, True, False]
    """
    try:
        name = _normalized_name(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    if name in allowed_names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True  # a page needs a DNS name for rebinding


def _normalized_name(name: str) -> str:
    return name.lower().removesuffix(".")


def is_from_browser(scope: Scope) -> bool:
    """Whether the request has a header that browsers send; over plain HTTP to another machine they are only some."""
    return any(
        name in (b"origin", b"referer")
        or name.startswith(b"sec-fetch-")
        or (name == b"user-agent" and value.startswith(b"Mozilla/"))
        for name, value in scope["headers"]
    )


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _cross_origin() -> ApiError:
    text = "a page of another origin may not call this server; its operator can allow it with --cors-origin"
    return ApiError(403, text, type=PERMISSION_ERROR, code="cross_origin")
