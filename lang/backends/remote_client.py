"""`RemoteClient` and `RemoteSession`: base of the backends for other services. A session stores the text itself; each
call is a separate request.

The instructions of one session run in order, on threads of the client's pool; sessions run in parallel.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.lang.backends.without_runtime import CallRequest, ClientWithoutRuntime, SessionWithoutRuntime, TextCall
from plait.lang.daemon_threads import DaemonThreads
from plait.runtime.errors import CallFailed, InputError, PlaitError
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


Part = tuple[str, bool]  # (text, whether it comes from the chat template)


class RemoteSession(SessionWithoutRuntime):
    """The methods of a session that programs use. `waits`: the instructions wait until the parent runs its fork."""

    def __init__(self, client: RemoteClient, *, waits: bool = False) -> None:
        super().__init__(client)
        self._client = client
        self._parts: list[Part] = []
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_busy = waits
        self._calls: list[TextCall] = []
        self._has_text = False

    def _has_prompt(self) -> bool:
        return self._has_text

    def append(self, text: str, *, control: bool = False) -> None:
        self._require_open()
        if text:
            self._has_text = True
            self._enqueue(lambda: self._parts.append((text, control)))

    def set_next_call_name(self, name: str | None) -> None:
        """Does nothing: a service does not know variables."""

    def _children(self, size: int, adapter: str | None) -> list[RemoteSession]:
        children = [RemoteSession(self._client, waits=True) for _ in range(size)]
        for child in children:
            child._has_text = self._has_text

        def start_children() -> None:
            for child in children:
                child._parts, child._failed = list(self._parts), self._failed
                child._client.pool.submit(child._run_queue)

        self._enqueue(start_children)
        return children

    def abort(self) -> None:
        """Aborts the session and its calls."""
        super().abort()
        for call in self._calls:
            call.abort()

    # -- order ------------------------------------------------------------------------------------

    def _begin(self, request: CallRequest) -> TextCall:
        if request.method == "exact":
            raise InputError(f"{self._client.name} cannot draw one of scored choices (select with exact)")
        self._client.check_request(request)
        call = TextCall(self._client, request.params.timeout_s)
        self._calls.append(call)

        def run() -> None:
            try:
                self._raise_if_failed()
                if not call.done():
                    self._client.run_call(call, tuple(self._parts), request)
                self._parts.append((call.result().text, False))
            except CallFailed as error:
                self._failed = self._failed or error
                call.on_failed(error)
            except PlaitError as error:
                self._failed = CallFailed(str(error))
                call.on_failed(self._failed)
            except Exception as error:  # an answer that does not follow the protocol
                self._failed = CallFailed(f"{self._client.name} sent an answer of an unknown form: {error!r:.200}")
                call.on_failed(self._failed)

        self._enqueue(run)
        return call

    def _enqueue(self, instruction: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(instruction)
            if self._is_busy:
                return
            self._is_busy = True
        self._client.pool.submit(self._run_queue)

    def _run_queue(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_busy = False
                    return
                instruction = self._queue.popleft()
            instruction()
