"""Every error a user of the runtime can meet, in one tree.

    PlaitError
    ├── InputError            the caller's value is wrong (also a ValueError)
    ├── ModelError            the model cannot be used
    │   ├── ModelNotFound     nothing at that path, or no model installed
    │   ├── CorruptModel      a file that is truncated or contradicts itself
    │   └── UnsupportedModel  a sound file that plait cannot run
    └── CallFailed            one call ended without a value; `kind` says why
        ├── ContextOverflow   prompt and answer do not fit the context or the KV pool
        ├── ConstraintFailed  the grammar did not compile, or it broke in the middle
        ├── Aborted           the call, its session or its client was ended on purpose
        ├── DeadlineExceeded  the call's own deadline passed
        ├── Overloaded        the queue is full; nothing was computed
        ├── CallRejected      the scheduler refused a value (also a ValueError)
        └── RuntimeGone       the runtime process ended or stopped answering

Knows: names and sentences. Must not know: who raises them.
"""

from __future__ import annotations

RUNTIME_EXITED = "the runtime process ended"  # how a RuntimeGone begins when it did


class PlaitError(Exception):
    """The root: `except PlaitError` catches whatever plait itself raises."""


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
    """Nothing at that path, or no model is installed."""


class CorruptModel(ModelError):
    """A model file is truncated or contradicts itself."""


class UnsupportedModel(ModelError):
    """The file is sound, but plait has no code for it."""


class CallFailed(PlaitError):
    """One call ended without a value. `kind` is the word that crossed the wire."""

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


class Overloaded(CallFailed):
    kind = "overloaded"


class RuntimeGone(CallFailed):
    kind = "runtime_gone"


class CallRejected(CallFailed, ValueError):
    """The scheduler refused a value that the client's own check should have caught."""

    kind = "invalid"


_BY_KIND: dict[str, type[CallFailed]] = {
    cls.kind: cls
    for cls in (
        ContextOverflow,
        ConstraintFailed,
        Aborted,
        DeadlineExceeded,
        Overloaded,
        RuntimeGone,
        CallRejected,
    )
}


def call_failed(kind: str, text: str) -> CallFailed:
    """The exception for a `Failed` message.

    >>> type(call_failed("deadline", "took longer than 2 s")).__name__
    'DeadlineExceeded'
    """
    return _BY_KIND.get(kind, CallFailed)(text, kind)
