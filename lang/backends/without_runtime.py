"""What clients, sessions and calls without a runtime share: those of other services, and the backends of plait.testing.

A session has its text itself. It makes a `CallRequest` of each gen and select; a subclass answers it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from plait.constrained.specs import Spec
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.session import check_fork_size
from plait.runtime.errors import Aborted, CallFailed, DeadlineExceeded, InputError
from plait.runtime.messages import SelectMethod
from plait.runtime.programs.backend import BackendSession
from plait.runtime.sampling_params import SamplingParams, check_sampling, sampling_params
from plait.runtime.tokenizer.detokenizer import Detokenizer

UNKNOWN_TOKEN = -1


class CallRequest(NamedTuple):
    """A gen, perhaps with a constraint; or a select, which has choices and a method, and of the parameters the timeout
    and the seed."""

    params: SamplingParams
    constraint: Spec | None = None
    choices: tuple[str, ...] | None = None
    method: SelectMethod | None = None


class ClientWithoutRuntime(ABC):
    """A `BackendClient` without token ids, whose sessions do not take the text behind a value. `has_adapters`: whether
    calls may name one."""

    takes_following_text = takes_token_ids = has_adapters = False

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.is_closed = False
        self._ids = itertools.count(1)

    @abstractmethod
    def open_session(self, *, program: int | None = None) -> BackendSession: ...

    def next_id(self) -> int:
        return next(self._ids)


class TextCall(Call):
    """A call whose text arrives as pieces of text. Its token ids are -1 (unknown)."""

    def __init__(self, client: ClientWithoutRuntime, timeout_s: float | None) -> None:
        detokenizer = Detokenizer(client.tokenizer.vocabulary)  # it never gets a token
        super().__init__(client.next_id(), detokenizer, self._end, timeout_s)

    def _end(self) -> None:
        self.on_failed(Aborted("the call was aborted"))

    def expire(self) -> None:
        self.on_failed(DeadlineExceeded("the call's timeout passed and the service did not answer"))

    def on_text(self, *pieces: str, num_tokens: int) -> None:
        with self._changed:
            self._pieces.extend(pieces)
            self._token_ids.extend([UNKNOWN_TOKEN] * num_tokens)
            self._notify()

    def on_result(
        self,
        reason: Any,
        usage: Usage,
        matched: Any = None,
        extra_meta: dict[str, Any] | None = None,
        lenient_constraint: Spec | None = None,
    ) -> None:
        with self._changed:
            if self._error is None:
                self._result = CallResult(
                    "".join(self._pieces),
                    reason,
                    usage,
                    matched,
                    list(self._token_ids),
                    extra_meta=extra_meta,
                    lenient_constraint=lenient_constraint,
                )
                self._notify()


class SessionWithoutRuntime(ABC):
    """A session that has its text itself. Once a call has failed, those after it fail too."""

    def __init__(self, client: ClientWithoutRuntime) -> None:
        self._has_adapters = client.has_adapters
        self._closed = False
        self._failed: CallFailed | None = None

    @abstractmethod
    def _has_prompt(self) -> bool:
        """Whether there is text before the next call."""

    @abstractmethod
    def _begin(self, request: CallRequest) -> Call:
        """Starts a call. Raises InputError for what the backend does not support."""

    @abstractmethod
    def _children(self, size: int, adapter: str | None) -> Sequence[BackendSession]:
        """Returns sessions that continue the text, with an adapter if it is not None."""

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call:
        """`trailing_text` is always empty, since the client does not take it."""
        check_sampling(params)
        if params.complete and constraint is None:
            raise InputError("complete needs a constraint, which defines when a value is complete")
        self._require_text("gen")
        return self._begin(CallRequest(params, constraint))

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call:
        if method not in get_args(SelectMethod):
            raise InputError(f"unknown select method {method!r:.80}; known are: {', '.join(get_args(SelectMethod))}")
        params = sampling_params(timeout_s=timeout_s, seed=seed)
        self._require_text("select")
        return self._begin(CallRequest(params, None, tuple(choices), method))

    def fork(self, size: int, adapter: str | None = None) -> Sequence[BackendSession]:
        check_fork_size(size)
        if adapter and not self._has_adapters:
            text = f"this backend has no adapters, and so no {adapter!r:.100}; name it as the backend's model"
            raise InputError(text)
        self._require_open()
        return self._children(size, adapter)

    def abort(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this session is closed")

    def _require_text(self, needed_by: str) -> None:
        self._require_open()
        if not self._has_prompt():
            raise InputError(f"the prompt is empty: add text before {needed_by}")

    def _raise_if_failed(self) -> None:
        """Raises the CallFailed of a call that comes after a failed one."""
        if self._failed is not None:
            text = f"the session cannot continue after a failed call: {self._failed}"
            raise CallFailed(text, self._failed.kind)
