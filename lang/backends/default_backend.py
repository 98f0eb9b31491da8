"""Selects the backend of a program: the given one, the default one, or the embedded model, started on first use."""

from __future__ import annotations

import atexit
import threading
from abc import ABC, abstractmethod
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from plait.lang.backends.cluster import Cluster
from plait.runtime.errors import InputError
from plait.runtime.programs.backend import NEEDED_OF_CLIENT

if TYPE_CHECKING:
    from plait.runtime.process.runtime import Runtime
    from plait.runtime.programs.backend import BackendClient


class HasClient(Protocol):
    """A Runtime, an Engine or another object with a client."""

    @property
    def client(self) -> BackendClient: ...


Backend: TypeAlias = "HasClient | BackendClient"

_lock = threading.Lock()
_default: BackendClient | None = None
_embedded: BackendClient | None = None
_explicit_backend_used = False
_embedded_settings: dict[str, Any] = {}


def set_default_backend(backend: Backend | None) -> None:
    """Sets the backend for programs that run without `backend=`: a Runtime, an Engine or a Client.

    None: the embedded model, which starts when a program first needs it and ends when Python exits.

    >>> set_default_backend(Runtime("model.gguf"))                      # doctest: +SKIP
    """
    global _default
    _default = None if backend is None else as_client(backend)


def default_backend() -> BackendClient | None:
    """Returns the client of the backend set by `set_default_backend`, or None."""
    return _default


class BackendOfBlock(ABC):
    """A backend that is its own client, and the default backend inside a `with` block."""

    _previous_backend: Backend | None = None

    @abstractmethod
    def _end_block(self, succeeded: bool) -> None:
        """Called at the end of the block; `succeeded`: without an exception."""

    @property
    def client(self) -> Any:
        return self

    def __enter__(self) -> Self:
        self._previous_backend = default_backend()
        set_default_backend(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        set_default_backend(self._previous_backend)
        self._end_block(kind is None)


def flush_cache(backend: Backend | None = None) -> None:
    """Drops every cached prefix that no running call uses."""
    resolve_client(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Returns the current counters of the runtime (pages, calls, cache hits) and its model, as a dict."""
    return resolve_client(backend).server_info()


def resolve_client(backend: Backend | None = None) -> BackendClient:
    """Returns the client to use. Starts the embedded model if no other backend is set; raises ModelNotFound if that is
    missing."""
    global _explicit_backend_used
    if backend is None and _default is None:
        return _start_embedded()
    _explicit_backend_used = True
    return _default if backend is None and _default is not None else as_client(backend)


def embedded_settings_ignored() -> bool:
    """Whether programs ran since `configure_embedded`, and none of them on the embedded model."""
    return _explicit_backend_used and _embedded is None


def as_client(backend: Any) -> BackendClient:
    """Returns the client of a backend, or a client itself. Raises InputError for anything else, and for a client that
    lacks a member of `BackendClient`, such as one of the two capabilities."""
    client = getattr(backend, "client", backend)
    if isinstance(backend, type) or not callable(getattr(client, "open_session", None)):
        raise InputError(f"a backend must be {_EXAMPLES}, not {backend!r:.80}{_backend_hint(backend)}")
    missing = [name for name in NEEDED_OF_CLIENT if not hasattr(client, name)]
    if missing:
        raise InputError(
            f"the backend {client!r:.80} has no {', no '.join(missing)}; a backend has the members of "
            "plait.runtime.programs.backend.BackendClient"
        )
    checked_client: BackendClient = client
    return checked_client


_EXAMPLES = "a Runtime, an Engine, a Client, a RuntimeEndpoint or another backend object"


def _backend_hint(backend: object) -> str:
    """Returns what to write instead of a text or a class, or ""."""
    if isinstance(backend, type):
        return f"; create one: {backend.__name__}(...)"
    if isinstance(backend, Cluster):
        return "; a Cluster runs batches: program.run_batch(items, backend=...)"
    if not isinstance(backend, str):
        return ""
    if backend.startswith(("http://", "https://")):
        return f"; write RuntimeEndpoint({backend!r:.80}), or OpenAI(model, base_url=...) for a chat API"
    return f"; write Runtime({backend!r:.80}) for a model on this machine"


def configure_embedded(**settings: Any) -> None:
    """Sets keyword arguments of the embedded `Runtime(...)`; used for --model and --device of the command line."""
    global _explicit_backend_used
    _explicit_backend_used = False
    _embedded_settings.update({name: value for name, value in settings.items() if value is not None})


def _shutdown_at_exit(runtime: Runtime) -> None:
    """Ends the runtime with Python. A second Ctrl-C ends the wait for its last step, without a traceback."""
    try:
        runtime.shutdown()
    except KeyboardInterrupt:
        runtime.shutdown(grace_s=0.0)


def _start_embedded() -> BackendClient:
    global _embedded
    with _lock:  # threads that need it at the same time start one only
        if _embedded is None or _embedded.is_closed:  # a new one is started if its process has died
            from plait.runtime.process.runtime import Runtime

            runtime = Runtime(**_embedded_settings)
            atexit.register(partial(_shutdown_at_exit, runtime))
            _embedded = runtime.client
        return _embedded
