"""`PortableError`: base of exceptions that can be copied and sent to another process, whatever arguments they take.

Python rebuilds an exception by calling its class with `args`, which fails for a class with other arguments; in a
process pool that failure leaves the parent waiting for ever. Here an exception is rebuilt without `__init__`. Its
cause, of any class, is rebuilt in the same way if it can be, and otherwise replaced by a `LostCause`.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None))
_MAX_CAUSES = 32


class PortableError(Exception):
    """An exception that survives a process boundary, with its attributes, its cause and the text of its traceback.

    `traceback_text`: the traceback of the exception and of its causes in the process that raised it; None in that
    process. A printed traceback shows it as a note.
    """

    traceback_text: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if self.traceback_text is None and self.__traceback__ is not None:
            text = "".join(traceback.format_exception(self)).rstrip()
            note = f"The traceback in the process that raised it:\n{text}"
            state |= {"traceback_text": text, "__notes__": [*getattr(self, "__notes__", ()), note]}
        causes = _causes_of(self)
        return _rebuilt, (type(self), self.args, causes, self.__suppress_context__), state

    def __copy__(self) -> PortableError:
        copied = _rebuilt(type(self), self.args, [], self.__suppress_context__)
        copied.__dict__.update(self.__dict__)
        return _with_origin(copied, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableError:
        copied = _rebuilt(type(self), copy.deepcopy(self.args, memo), [], self.__suppress_context__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return _with_origin(copied, self)


class LostCause(Exception):
    """Replaces a cause that cannot be rebuilt in this process. The text has the type and the message of the cause."""


def _with_origin(copied: PortableError, original: PortableError) -> PortableError:
    """Gives a copy in the same process the cause and the traceback of the original."""
    copied.__context__, copied.__cause__ = original.__context__, original.__cause__
    copied.__suppress_context__ = original.__suppress_context__
    return copied.with_traceback(original.__traceback__)


def _causes_of(error: BaseException) -> list[Any]:
    """Returns the chain of causes up to and with the next PortableError, which knows its own causes."""
    causes: list[Any] = []
    cause = error.__cause__
    while cause is not None and len(causes) < _MAX_CAUSES:
        if isinstance(cause, PortableError):
            return [*causes, cause]
        causes.append(_description(cause))
        cause = cause.__cause__
    return causes


def _description(cause: BaseException) -> tuple[Any, ...]:
    """Returns (its class or None, its arguments, its attributes, its text), of plain values only."""
    kind = type(cause)
    is_plain = _is_importable(kind) and all(type(value) in _PLAIN_TYPES for value in cause.args)
    attributes = {name: value for name, value in cause.__dict__.items() if type(value) in _PLAIN_TYPES}
    try:
        message = str(cause)
    except Exception as error:  # a __str__ that fails must not hide the error that it belongs to
        message = f"<its text failed: {type(error).__name__}>"
    text = f"{kind.__qualname__}{': ' + message if message else ''}"
    return (kind, cause.args, attributes, text) if is_plain else (None, (), {}, text)


def _is_importable(kind: type) -> bool:
    """Whether another process finds the class by its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _rebuilt(
    kind: type[PortableError], args: tuple[Any, ...], causes: list[Any], suppress_context: bool
) -> PortableError:
    error = kind.__new__(kind, *args)
    error.args = args
    effect: BaseException = error
    for cause in causes:
        effect.__cause__ = cause if isinstance(cause, PortableError) else _rebuilt_cause(*cause)
        effect = effect.__cause__
    error.__suppress_context__ = suppress_context
    return error


def _rebuilt_cause(
    kind: Callable[..., BaseException] | None, args: tuple[Any, ...], attributes: dict[str, Any], text: str
) -> BaseException:
    try:
        cause = None if kind is None else kind(*args)
    except Exception:  # a class that takes other arguments than it keeps
        cause = None
    if cause is None or type(cause) is not kind:
        return LostCause(text)
    cause.__dict__.update(attributes)
    return cause
