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
    │   └── QueueTimeout  it passed in the queue, or the call's adapter was not read in time; nothing was computed
    ├── Overloaded        the queue is full; nothing was computed
    ├── CallRejected      the scheduler rejected a value (also a ValueError)
    └── RuntimeGone       the runtime process ended or stopped answering
"""

from __future__ import annotations

from plait.runtime.portable_error import PortableError

RUNTIME_EXITED = "the runtime process ended"  # the start of the message if the process has exited
CLIENT_CLOSED = "this client was closed"


class PlaitError(PortableError):
    """Base class of all exceptions raised by plait. They can be copied and sent to another process, with their cause;
    `traceback_text` is then the traceback of the process that raised the exception."""


class InputError(PlaitError, ValueError):
    """A caller's value is out of range, of the wrong type, or unknown. The message names the argument, and often
    what to write instead.

    `field`: the field of `SamplingParams` (or "cache_salt") that the error is about, None for anything else.
    """

    def __init__(self, text: str, *, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class ModelError(PlaitError):
    """Base class of the errors of a model: it is missing, damaged or not supported."""


class ModelNotFound(ModelError):
    """There is no model at that path, or none is installed. The message says what to install or correct."""


class CorruptModel(ModelError):
    """A model file is truncated or inconsistent. Download it again."""


class UnsupportedModel(ModelError):
    """The model is valid, but plait cannot run it. The message names the architecture, format or field."""


class CallFailed(PlaitError):
    """A call ended without a value; the subclass tells why. In a program it is the `__cause__` of a ProgramError.

    `kind`: the error code. "internal", which has no subclass, is an error inside the runtime, whose log
    has the traceback, or an unexpected answer of a service.
    """

    kind = "internal"

    def __init__(self, text: str, kind: str | None = None) -> None:
        super().__init__(text)
        if kind is not None:
            self.kind = kind


class ContextOverflow(CallFailed):
    """Prompt and completion exceed the context length or the KV cache. Shorten the prompt or lower `max_tokens`."""

    kind = "context_overflow"


class ConstraintFailed(CallFailed):
    """The constraint could not be compiled, failed during generation, or has no complete value within `max_tokens`.
    The message names the reason; correct the pattern, schema or grammar, or raise `max_tokens`. `where`: the place in
    the constraint, a JSON pointer, if the reason has one."""

    kind = "constraint"
    where: str | None = None


class Aborted(CallFailed):
    """The call, its session or its client was ended: by `abort`, `cancel`, a race, a closed session or a shutdown. What
    ended it is in the program; read a value before it is aborted, or test for it with `state.error()`."""

    kind = "aborted"


class DeadlineExceeded(CallFailed):
    """The call did not finish within its `timeout`. Raise it, or generate fewer tokens."""

    kind = "deadline"


class QueueTimeout(DeadlineExceeded):
    """The call's timeout passed while it waited in the queue, or its adapter could not be read in time. Nothing was
    computed for it. Try again later, raise the timeout, or send fewer calls at a time."""

    kind = "queue_timeout"


class Overloaded(CallFailed):
    """The queue of the runtime or service is full, and nothing was computed. Try again later."""

    kind = "overloaded"


class RuntimeGone(CallFailed):
    """The runtime process ended, or cannot be reached. Start a new Runtime and run the program again."""

    kind = "runtime_gone"


class NotRestarted(RuntimeGone):
    """The runtime process has ended, and none will follow it. The message says why, and names nothing of the model."""


class CallRejected(CallFailed, ValueError):
    """The runtime or service refused the arguments of the call. The message names the argument to correct."""

    kind = "invalid"


VALUE_DOES_NOT_FIT = "value_does_not_fit"  # the kind of a ConstraintFailed: no complete value within max_tokens

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
_BY_KIND[VALUE_DOES_NOT_FIT] = ConstraintFailed


def call_failed(kind: str, text: str, where: str | None = None) -> CallFailed:
    """Returns the exception for a `Failed` message.

    >>> type(call_failed("deadline", "took longer than 2 s")).__name__
    'DeadlineExceeded'
    """
    error = _BY_KIND.get(kind, CallFailed)(text, kind)
    if isinstance(error, ConstraintFailed):
        error.where = where
    return error
