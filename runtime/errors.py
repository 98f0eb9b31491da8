"""All exceptions that the runtime raises to its users.

PlaitError
├── InputError            an argument is wrong (also a ValueError)
├── ModelError            the model cannot be used
│   ├── ModelNotFound     there is no file at that path, or no model is installed
│   ├── CorruptModel      a file is truncated or inconsistent
│   └── UnsupportedModel  the file is valid, but plait cannot run it
└── CallFailed            one call ended without a value; `kind` says why
    ├── ContextOverflow   prompt and completion do not fit the context or the KV pool
    ├── ConstraintFailed  the grammar did not compile, or failed while sampling
    ├── Aborted           the call, its session or its client was ended deliberately
    ├── DeadlineExceeded  the call's timeout passed
    │   └── QueueTimeout  it passed while the call waited in the queue; nothing was computed
    ├── Overloaded        the queue is full; nothing was computed
    ├── CallRejected      the scheduler rejected a value (also a ValueError)
    └── RuntimeGone       the runtime process ended or stopped answering
"""

from __future__ import annotations

RUNTIME_EXITED = "the runtime process ended"  # the start of the message if the process has exited
CLIENT_CLOSED = "this client was closed"


class PlaitError(Exception):
    """Base class of all exceptions raised by plait."""


class InputError(PlaitError, ValueError):
    """A caller's value is out of range, of the wrong type, or unknown.

    `field`: the field of `SamplingParams` (or "cache_salt") that the error is about, None for anything else.
    """

    def __init__(self, text: str, *, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class ModelError(PlaitError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """There is no file at that path, or no model is installed."""


class CorruptModel(ModelError):
    """A model file is truncated or inconsistent."""


class UnsupportedModel(ModelError):
    """The model file is valid, but plait does not support it."""


class CallFailed(PlaitError):
    """A call ended without a value. `kind` is the error code of the `Failed` message."""

    kind = "internal"

    def __init__(self, text: str, kind: str | None = None) -> None:
        super().__init__(text)
        if kind is not None:
            self.kind = kind


class ContextOverflow(CallFailed):
    kind = "context_overflow"


class ConstraintFailed(CallFailed):
    kind = "constraint"


class Aborted(CallFailed):
    kind = "aborted"


class DeadlineExceeded(CallFailed):
    kind = "deadline"


class QueueTimeout(DeadlineExceeded):
    """The call's timeout passed while it waited in the queue. Nothing was computed for it."""

    kind = "queue_timeout"


class Overloaded(CallFailed):
    kind = "overloaded"


class RuntimeGone(CallFailed):
    kind = "runtime_gone"


class CallRejected(CallFailed, ValueError):
    """The scheduler rejected a value that the client should have rejected before."""

    kind = "invalid"


_BY_KIND: dict[str, type[CallFailed]] = {
    cls.kind: cls
    for cls in (
        ContextOverflow,
        ConstraintFailed,
        Aborted,
        DeadlineExceeded,
        QueueTimeout,
        Overloaded,
        RuntimeGone,
        CallRejected,
    )
}


def call_failed(kind: str, text: str) -> CallFailed:
    """Returns the exception for a `Failed` message.

    >>> type(call_failed("deadline", "took longer than 2 s")).__name__
    'DeadlineExceeded'
    """
    return _BY_KIND.get(kind, CallFailed)(text, kind)
