"""Programs with one mistake, at the line marked `# here`, and the check of the error that the mistake causes."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.lang.source_location import error_location

Function = Callable[..., Any]


def make_registry() -> tuple[list[Any], Callable[..., Callable[[Function], Function]]]:
    """(parameters of a test, decorator that adds a function to them).

    The decorated function makes one mistake: as the body of a program if it takes the state `s`, as the caller of a
    program otherwise. The decorator takes the phrases that the message must contain, and the type of the error as
    `kind`. Phrases are identifiers, values and the code to write instead; the sentences around them may change.
    """
    cases: list[Any] = []

    def mistake(*phrases: str, kind: type[Exception] = plait.ProgramError) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            cases.append(pytest.param(function, phrases, kind, id=function.__name__))
            return function

        return register

    return cases, mistake


def error_faults(function: Function, phrases: tuple[str, ...], kind: type[Exception]) -> list[str]:
    """Makes the mistake. Returns what the error lacks: its type, a phrase, or the line marked `# here`."""
    takes_state = "s" in function.__code__.co_varnames[: function.__code__.co_argcount]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the type is compared below
        plait.function(function).run() if takes_state else function()
    error = caught.value
    place = error.place if isinstance(error, plait.ProgramError) else error_location(error)
    faults = [f"{str(error)!r} does not contain {phrase!r}" for phrase in phrases if phrase not in str(error)]
    if not isinstance(error, kind):
        faults.append(f"{error!r} is not a {kind.__name__}")
    if place is None or "# here" not in linecache.getline(place.filename, place.lineno):
        faults.append(f"{place} is not the line of the mistake")
    elif isinstance(error, plait.ProgramError):
        end = f"{Path(function.__code__.co_filename).name}:{place.lineno})"
        if not str(error).endswith(end):
            faults.append(f"{str(error)!r} does not end with {end!r}")
    return faults
