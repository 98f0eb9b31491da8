"""`RemoteClient`: base of the backends for other services. Offers programs the methods of a runtime's client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.lang.backends.remote_session import Part, RemoteSession
from plait.lang.backends.without_runtime import CallRequest, ClientWithoutRuntime, TextCall
from plait.lang.daemon_threads import DaemonThreads
from plait.runtime.errors import InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate

MAX_CONCURRENCY = 64


class _EmptyVocabulary:
    token_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class RemoteModel:
    """The model of a service, as far as it is known."""

    model_path: str
    vocab_size: int = 1 << 31
    context_length: int = 0


class RemoteTokenizer:
    """Holds the chat template. The service itself tokenizes."""

    def __init__(self, chat_template: ChatTemplate | None) -> None:
        self.chat_template = chat_template
        self.vocabulary = _EmptyVocabulary()
        self.control_ids: frozenset[int] = frozenset()
        self.control_texts: dict[int, str] = {}
        self.eos_ids: tuple[int, ...] = ()

    def encode(self, parts: Sequence[Part], *, at_start: bool) -> list[int]:
        return []


def checked_model(backend: str, name: object) -> None:
    """Raises InputError unless `name` is non-empty text."""
    if not isinstance(name, str) or not name:
        raise InputError(f"{backend} needs the name of a model, not {name!r:.80}")


class RemoteClient(ClientWithoutRuntime):
    """A client of a service. `pool` runs its requests, at most `max_concurrency` at a time."""

    name = "this service"

    def __init__(self, model: RemoteModel, template: ChatTemplate | None, max_concurrency: int) -> None:
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise InputError(f"max_concurrency must be at least 1, not {max_concurrency!r:.40}")
        super().__init__(model, RemoteTokenizer(template))
        self.pool = DaemonThreads(max_concurrency, f"plait {type(self).__name__}")

    def open_session(self, *, program: int | None = None) -> RemoteSession:
        return RemoteSession(self)

    def close(self) -> None:
        """Ends the threads after their current requests. Idempotent."""
        self.is_closed = True
        self.pool.shutdown()

    shutdown = close

    def flush_cache(self) -> Any:
        raise InputError(f"{self.name} has no cache that can be flushed")

    def server_info(self) -> dict[str, Any]:
        return {"model_path": self.model.model_path}

    @abstractmethod
    def check_request(self, request: CallRequest) -> None:
        """Raises InputError for what this service does not support, before anything is sent."""

    @abstractmethod
    def run_call(self, call: TextCall, parts: Sequence[Part], request: CallRequest) -> None:
        """Sends the request, and passes its text and result to `call`. Raises CallFailed."""
