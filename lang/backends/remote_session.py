"""`RemoteSession`: a session with another service. It stores the text itself; each call is a separate request.

The instructions of one session run in order, on threads of the client's pool; sessions run in parallel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plait.constrained.specs import Spec
from plait.lang.backends.without_runtime import SessionWithoutRuntime, refuse_adapter
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.session import check_fork_size
from plait.runtime.errors import Aborted, CallFailed, DeadlineExceeded, InputError, PlaitError
from plait.runtime.messages import SelectMethod
from plait.runtime.sampling_params import SamplingParams, check_sampling, sampling_params
from plait.runtime.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    from plait.lang.backends.remote_client import RemoteClient

Part = tuple[str, bool]  # (text, whether it comes from the chat template)
UNKNOWN_TOKEN = -1


class RemoteCall(Call):
    """A call whose text arrives as pieces of text. Its token ids are -1 (unknown)."""

    def __init__(self, call_id: int, timeout_s: float | None, detokenizer: Detokenizer) -> None:
        super().__init__(call_id, detokenizer, self._end, timeout_s)

    def _end(self) -> None:
        self.on_failed(Aborted("the call was aborted"))

    def expire(self) -> None:
        self.on_failed(DeadlineExceeded("the call's timeout passed and the service did not answer"))

    def on_text(self, piece: str, num_tokens: int) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._token_ids.extend([UNKNOWN_TOKEN] * num_tokens)
            self._notify()

    def on_result(self, reason: Any, usage: Usage, matched: Any, extra_meta: dict[str, Any] | None) -> None:
        with self._changed:
            if self._error is None:
                text = "".join(self._pieces)
                self._result = CallResult(text, reason, usage, matched, list(self._token_ids), extra_meta=extra_meta)
                self._notify()


class RemoteSession(SessionWithoutRuntime):
    """The methods of a session that programs use. `waits`: the instructions wait until the parent runs its fork."""

    def __init__(self, client: RemoteClient, parts: Sequence[Part] = (), *, waits: bool = False) -> None:
        super().__init__()
        self._client = client
        self._parts: list[Part] = list(parts)
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_busy = waits
        self._calls: list[RemoteCall] = []
        self._has_text = bool(parts) or waits

    def _has_prompt(self) -> bool:
        return self._has_text

    def append(self, text: str, *, control: bool = False) -> None:
        self._require_open()
        if text:
            self._has_text = True
            self._enqueue(lambda: self._parts.append((text, control)))

    def set_next_call_name(self, name: str | None) -> None:
        """Does nothing: a service does not know variables."""

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> RemoteCall:
        """`trailing_text` is always empty, since the client does not take it."""
        check_sampling(params)
        self._require_text("gen")
        self._client.check_generate(params, constraint)

        def run_call(call: RemoteCall) -> str:
            self._client.generate(call, tuple(self._parts), params, constraint)
            return call.result().text

        return self._begin(params.timeout_s, run_call)

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> RemoteCall:
        if method == "exact":
            raise InputError(f"{self._client.name} cannot draw one of scored choices (select with exact)")
        if timeout_s is not None:
            sampling_params(timeout_s=timeout_s)
        self._require_text("select")
        self._client.check_select(choices, method)

        def run_call(call: RemoteCall) -> str:
            self._client.select(call, tuple(self._parts), choices, method, timeout_s)
            return call.result().text

        return self._begin(timeout_s, run_call)

    def fork(self, size: int, adapter: str | None = None) -> list[RemoteSession]:
        check_fork_size(size)
        refuse_adapter(adapter)
        self._require_open()
        children = [RemoteSession(self._client, waits=True) for _ in range(size)]
        for child in children:
            child._has_text = self._has_text

        def start_children() -> None:
            for child in children:
                child._parts, child._failed = list(self._parts), self._failed
                child._start()

        self._enqueue(start_children)
        return children

    def abort(self) -> None:
        """Aborts the session and its calls."""
        super().abort()
        for call in self._calls:
            call.abort()

    # -- order ------------------------------------------------------------------------------------

    def _begin(self, timeout_s: float | None, run_call: Callable[[RemoteCall], str]) -> RemoteCall:
        call = RemoteCall(self._client.next_id(), timeout_s, self._client.detokenizer())
        self._calls.append(call)

        def run() -> None:
            try:
                self._raise_if_failed()
                if not call.done():
                    run_call(call)
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

    def _start(self) -> None:
        """Runs the waiting instructions; called when the parent runs its fork."""
        self._client.pool.submit(self._run_queue)
