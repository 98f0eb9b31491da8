"""Which runtime a program talks to: the one given, the default one, or the embedded one, started if need be."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.client.client import Client


class HasClient(Protocol):
    """A Runtime or an Engine, as programs see it."""

    @property
    def client(self) -> Client: ...


Backend: TypeAlias = "HasClient | Client"

_lock = threading.Lock()
_default: Client | None = None
_embedded: Client | None = None
_explicit_backend_used = False
_embedded_settings: dict[str, Any] = {}


def set_default_backend(backend: Backend | None) -> None:
    """The runtime for programs that are run without `backend=`: a Runtime, an Engine or a Client.

    None: the embedded model again, started when a program first needs it and ended when Python exits.

    >>> set_default_backend(Runtime("path/to/model"))                   # doctest: +SKIP
    """
    global _default
    _default = None if backend is None else as_client(backend)


def default_backend() -> Client | None:
    """What `set_default_backend` was given, as a client."""
    return _default


def flush_cache(backend: Backend | None = None) -> None:
    """Drops every cached prefix that no running call needs."""
    resolve_client(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Counts of the runtime now (pages, calls, hits) and what model it serves, as a dict."""
    client = resolve_client(backend)
    said = getattr(client, "server_info", None)  # a backend elsewhere asks its server
    if said is not None:
        return dict(said())
    info = msgspec.structs.asdict(client.model) | msgspec.structs.asdict(client.status())
    return {name: value for name, value in info.items() if name not in ("call", "protocol")}


def resolve_client(backend: Backend | None = None) -> Client:
    """The client to use; starts the embedded model if there is no other, or raises ModelNotFound."""
    global _explicit_backend_used
    if backend is None and _default is None:
        return _start_embedded()
    _explicit_backend_used = True
    return _default if backend is None and _default is not None else as_client(backend)


def embedded_settings_ignored() -> bool:
    """Whether programs ran since `configure_embedded`, and all of them on backends of their own."""
    return _explicit_backend_used and _embedded is None


def as_client(backend: Any) -> Client:
    """The client of a Runtime, an Engine or a Client; InputError for anything else."""
    client = getattr(backend, "client", backend)
    if isinstance(backend, type) or not callable(getattr(client, "open_session", None)):
        raise InputError(f"a backend is a Runtime, an Engine or a Client, not {backend!r:.80}")
    found: Client = client
    return found


def configure_embedded(**settings: Any) -> None:
    """Settings of the default `Runtime(...)`, when it is started: the command line's --model and --device."""
    global _explicit_backend_used
    _explicit_backend_used = False
    _embedded_settings.update({name: value for name, value in settings.items() if value is not None})


def _start_embedded() -> Client:
    global _embedded
    with _lock:  # two threads that need it start one
        if _embedded is None or _embedded.is_closed:  # its process may have died: then another
            from plait.runtime.process.runtime import Runtime

            runtime = Runtime(**_embedded_settings)
            atexit.register(runtime.shutdown)
            _embedded = runtime.client
        return _embedded
