"""The errors of a program: they name the program, the variable, and what went wrong.

PlaitError
├── ProgramError            a program's body, or one of its calls, failed; `__cause__` is the reason
│   ├── MissingVariable     a name that was never generated (also a KeyError)
│   └── UnreadableValue     a text that is not a whole value of its gen's type (also a ValueError)
└── CompileError            compile() found what would go wrong, or cannot follow the program
    └── DependsOnValue      what the body does next depends on a value that only a run knows
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plait.lang.source_location import SourceLocation, caller_location
from plait.runtime.errors import InputError, PlaitError


class ProgramError(PlaitError):
    """A program failed. `program` is its name, `variable` the value that is missing (None: no one value), `place` the
    file and line of the program where the failure came up, or where the call that failed was written.

    The original exception, with its traceback, is `__cause__`.

    >>> try: qa.run(question="?", timeout=0.001)          # doctest: +SKIP
    ... except ProgramError as error: print(error.variable, error.__cause__)
    """

    place: SourceLocation | None = None

    def __init__(self, text: str, *, program: str, variable: str | None = None) -> None:
        super().__init__(text)
        self.program = program
        self.variable = variable

    def copy_to_raise(self) -> ProgramError:
        """The same error to raise once more; raising one object twice would mix its tracebacks."""
        fresh = type(self)(str(self), program=self.program, variable=self.variable)
        fresh.__dict__.update(self.__dict__)
        fresh.__cause__ = self.__cause__
        return fresh.with_traceback(self.__traceback__)  # the line of the body that it came from


class MissingVariable(ProgramError, KeyError):
    """The program has no variable of that name."""

    __str__ = Exception.__str__  # KeyError would print the repr


class UnreadableValue(ProgramError, ValueError):
    """A typed gen's text cannot be read as its type; `text` is what was generated."""

    def __init__(self, text: str, *, program: str, variable: str | None = None, generated: str = "") -> None:
        super().__init__(text, program=program, variable=variable)
        self.text = generated


class CompileError(PlaitError):
    """A program cannot be compiled. `problems` are all that were found, each with its sentence and its place; `place`
    is the first one's. What the body raised is `__cause__`."""

    def __init__(self, program: str, problems: Sequence[Problem]) -> None:
        super().__init__(
            "\n".join(f"program {program!r}: {_with_location(each.text, each.place)}" for each in problems)
        )
        self.program = program
        self.problems = tuple(problems)
        self.place = self.problems[0].place if self.problems else None


class DependsOnValue(CompileError):
    """What the body does next depends on a value that only a run knows."""


class Problem(NamedTuple):
    """What is wrong, and where."""

    text: str
    place: SourceLocation | None


def unreadable_value(
    program: str, variable: str | None, generated: str, why: str, place: SourceLocation | None
) -> UnreadableValue:
    """The error for a value that `why` cannot be read; `place`: of its gen."""
    text = _with_location(f"{_subject(program, variable)}: {why}", place)
    error = UnreadableValue(text, program=program, variable=variable, generated=generated)
    error.place = place
    return error


def program_error(
    program: str, variable: str | None, cause: BaseException, place: SourceLocation | None = None
) -> ProgramError:
    """A ProgramError that says which program, variable and line `cause` hit; `cause` becomes its `__cause__`."""
    said = str(cause)
    text = f"{_subject(program, variable)}: {type(cause).__name__}{': ' + said if said else ''}"
    error = ProgramError(_with_location(text, place), program=program, variable=variable)
    error.place = place
    error.__cause__ = cause
    return error


def missing_variable(program: str, name: str, existing: Iterable[str]) -> MissingVariable:
    """The error for reading `name` where only `existing` are there."""
    names, place = sorted(existing), caller_location()
    there = f"it has {', '.join(map(repr, names))}" if names else "it has no variables yet"
    text = f"program {program!r}: there is no variable {name!r}{did_you_mean(name, names)}; {there}"
    error = MissingVariable(_with_location(text, place), program=program, variable=name)
    error.place = place
    return error


def _subject(program: str, variable: str | None) -> str:
    return f"program {program!r}" + (f", variable {variable!r}" if variable is not None else "")


def _with_location(text: str, place: SourceLocation | None) -> str:
    return text if place is None else f"{text} (at {place})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'stop'?)"`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown_keyword(where: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a keyword that `where` (such as "gen") does not take.

    >>> str(unknown_keyword("gen", "temprature", ["temperature"]))
    "gen has no keyword 'temprature' (did you mean 'temperature'?); known are: temperature"
    """
    if name in UNSUPPORTED_KEYWORDS:
        return InputError(f"{where}: {name!r} is not supported: {UNSUPPORTED_KEYWORDS[name]}")
    names = list(known)
    return InputError(f"{where} has no keyword {name!r}{did_you_mean(name, names)}; known are: {', '.join(names)}")


_PER_GEN_ONLY = "a constraint belongs to one gen, which takes it as a keyword"
UNSUPPORTED_KEYWORDS = {
    **dict.fromkeys(("json_schema", "ebnf", "lark", "constraint", "complete"), _PER_GEN_ONLY),
    "use_thread": "calls always go on while the body does, so it can only be True, in run",
    "num_api_spec_tokens": "it speculates on API models that plait does not call",
}
