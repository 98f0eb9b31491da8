"""One raised example of every public exception class, and functions that raise them in another process."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import plait
import plait.constrained
import plait.testing
from plait.lang.errors import CompileError, Problem, ProgramError, UnreadableValue
from plait.lang.source_location import SourceLocation
from plait.runtime.errors import InputError, PlaitError
from plait.testing import Scripted

PLACE = SourceLocation("agent.py", 12)


def public_classes() -> dict[str, type[BaseException]]:
    """The public exception classes, and all other subclasses of PlaitError, by their names."""
    for package in ("lang", "runtime"):
        for module in pkgutil.walk_packages(importlib.import_module(f"plait.{package}").__path__, f"plait.{package}."):
            if "executor" not in module.name and "models" not in module.name and "kernels" not in module.name:
                importlib.import_module(module.name)
    exported = [getattr(space, name) for space in (plait, plait.testing, plait.constrained) for name in space.__all__]
    found = {value for value in exported if isinstance(value, type) and issubclass(value, BaseException)}
    return {kind.__qualname__: kind for kind in (*found, *_subclasses(PlaitError))}


def _subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for subclass in kind.__subclasses__():
        if subclass.__module__.startswith("plait."):
            yield subclass
            yield from _subclasses(subclass)


def example(kind: type[BaseException]) -> BaseException:
    """An instance with all that its class can have."""
    if issubclass(kind, CompileError):
        return kind("qa", [Problem("never set", PLACE), Problem("never read", None)])
    if issubclass(kind, UnreadableValue):
        error: Any = kind("cut off", program="qa", variable="age", generated="12")
    elif issubclass(kind, ProgramError):
        error = kind("there is no such variable", program="qa", variable="age")
    elif issubclass(kind, InputError):
        return kind("out of range", field="temperature")
    elif issubclass(kind, plait.CallFailed):
        return kind("no", "another kind")
    else:
        return kind("no")
    error.place = PLACE
    return error


class UnusualError(Exception):
    """Cannot be rebuilt from its arguments, as many exceptions of libraries."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raised(name: str) -> BaseException:
    """Returns the example of a class, raised from a cause that itself has one."""
    try:
        try:
            try:
                raise UnusualError(code=3)
            except UnusualError as first:
                raise LookupError("no document", 4) from first
        except LookupError as cause:
            raise example(public_classes()[name]) from cause
    except BaseException as error:
        return error


def raise_it(name: str) -> None:
    """Raises what `raised` returns."""
    error = raised(name)
    raise error from error.__cause__


def same(error: BaseException) -> BaseException:
    """Returns its argument."""
    return error


def with_foreign_cause() -> BaseException:
    """An error whose cause has arguments that cannot be sent."""
    try:
        raise PlaitError("no") from ValueError(lambda: 0, 1)
    except PlaitError as error:
        return error


@plait.function
def failing_program(s, item):
    """Fails as the program of a user: it reads a variable that is not there."""
    s += "Q" + plait.gen("answer")
    if item == 1:
        s["answr"]
    return s["answer"]


def run_failing_program(item: int) -> str:
    """An item of a process pool."""
    return failing_program.run(item, backend=Scripted(lambda asked: f"answer {item}"))["answer"]
