"""What clients and sessions without a runtime share: those of other services, and the backends of plait.testing."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

from plait.runtime.errors import CallFailed, InputError
from plait.runtime.programs.backend import BackendSession


def refuse_adapter(name: str | None) -> None:
    """Raises InputError for an adapter: a service names each by a model of its own."""
    if name:
        raise InputError(f"this backend has no adapters, and so no {name!r:.100}; name it as the backend's model")


class ClientWithoutRuntime(ABC):
    """A `BackendClient` without token ids, whose sessions do not take the text behind a value."""

    takes_following_text = takes_token_ids = False

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.is_closed = False
        self._ids = itertools.count(1)

    @abstractmethod
    def open_session(self, *, program: int | None = None) -> BackendSession: ...

    def next_id(self) -> int:
        return next(self._ids)


class SessionWithoutRuntime(ABC):
    """A session that has its text itself. Once a call has failed, those after it fail too."""

    def __init__(self) -> None:
        self._closed = False
        self._failed: CallFailed | None = None

    @abstractmethod
    def _has_prompt(self) -> bool:
        """Whether there is text before the next call."""

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
