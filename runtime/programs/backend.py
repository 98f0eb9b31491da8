"""The protocol that a program's backend implements: runtimes, other services and the backends of plait.testing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from plait.constrained.specs import Spec
    from plait.runtime.client.call import Call
    from plait.runtime.messages import SelectMethod
    from plait.runtime.sampling_params import SamplingParams


class BackendSession(Protocol):
    """One growing text. Calls are started after it, in order and without waiting; see `runtime.client.Session`."""

    def set_next_call_name(self, name: str | None) -> None:
        """Says which variable the next call sets."""

    def append(self, text: str, *, control: bool = False) -> None: ...
    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call: ...
    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call: ...
    def fork(self, size: int, adapter: str | None = None) -> Sequence[BackendSession]:
        """As `runtime.client.Session.fork`. Raises InputError for an adapter where the backend has none."""

    def abort(self) -> None: ...
    def close(self) -> None: ...


NEEDED_OF_CLIENT = ("open_session", "next_id", "model", "tokenizer", "takes_following_text", "takes_token_ids")
"""The members of `BackendClient` that every run reads."""


class BackendClient(Protocol):
    """`model` has a `model_path`, a `vocab_size` and a `context_length`; `tokenizer` a `chat_template`.

    Capabilities: `takes_following_text`: a session's `generate` takes `trailing_text`. `takes_token_ids`: a session has
    `append_tokens`, and its calls return token ids and logprobs.
    """

    @property
    def takes_following_text(self) -> bool: ...
    @property
    def takes_token_ids(self) -> bool: ...
    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def is_closed(self) -> bool: ...
    def next_id(self) -> int: ...
    def open_session(self, *, program: int | None = None) -> BackendSession: ...
    def flush_cache(self) -> Any: ...
    def server_info(self) -> dict[str, Any]: ...
