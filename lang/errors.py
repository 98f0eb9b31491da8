"""The errors of programs. Each names the program, the variable, the cause and the line.

PlaitError
├── ProgramError            the body of a program or one of its calls failed; `__cause__` is the reason
│   ├── MissingVariable     there is no variable of that name (also a KeyError)
│   └── UnreadableValue     the text of a typed gen is not a valid value of its type (also a ValueError)
├── ToolError               a tool of an MCP server failed, or its server
└── CompileError            compile() found an error in the program, or cannot trace it
    └── DependsOnValue      the next step of the body depends on a value known at run time only
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plait.lang.source_location import SourceLocation, caller_location
from plait.runtime.errors import InputError, PlaitError
from plait.runtime.similar_names import did_you_mean


class ProgramError(PlaitError):
    """A program failed: its body raised, or one of its calls ended without a value. The message names the line; what to
    do depends on `__cause__`.

    `program`: its name. `variable`: the variable without a value (None: no single one). `place`: the file and line of
    the failure, or of the call that failed.

    `steps` and `messages`: of a failed `plait.agent`, the calls of tools (AgentStep) and the turns until then.

    `__cause__` is the original exception with its traceback.

    >>> try: qa.run(question="?", timeout=0.001)          # doctest: +SKIP
    ... except ProgramError as error: print(error.variable, error.__cause__)
    """

    place: SourceLocation | None = None
    steps: Sequence[Any] = ()  # AgentStep
    messages: Sequence[Mapping[str, str]] = ()

    def __init__(self, text: str, *, program: str, variable: str | None = None) -> None:
        super().__init__(text)
        self.program = program
        self.variable = variable

    def copy_to_raise(self) -> ProgramError:
        """Returns a copy to raise again, since raising one object twice mixes its tracebacks."""
        return copy.copy(self)  # keeps the cause, and the line of the body that it came from


class MissingVariable(ProgramError, KeyError):
    """The program has no variable of that name. The message lists its variables; correct the name, or read it after the
    gen that sets it."""

    __str__ = Exception.__str__  # KeyError.__str__ returns the repr


class Attempt(NamedTuple):
    """A text that a typed gen gave, and the reason why it is not a value of its type."""

    text: str
    reason: str


class UnreadableValue(ProgramError, ValueError):
    """The text of a typed gen is not a value of its type: `max_tokens` cut it off, or a validator rejected it.

    `text`: the generated text. `attempts`: every text that was generated, each with the reason why it was refused;
    with `retries=` there are several, and `text` is the last one. To avoid cut values, raise `max_tokens` or leave out
    `complete=False`. To have the model correct values that a validator rejects, set `retries=`.
    """

    def __init__(
        self,
        text: str,
        *,
        program: str,
        variable: str | None = None,
        generated: str = "",
        attempts: Sequence[Attempt] = (),
    ) -> None:
        super().__init__(text, program=program, variable=variable)
        self.text = generated
        self.attempts = tuple(attempts)


class ToolError(PlaitError):
    """A tool of an MCP server reported an error, or its server has ended or did not answer in time. In `s.call` it is
    the result's `error`, and the model reads its message."""


class CompileError(PlaitError):
    """A program cannot be compiled. Correct the lines that the message names.

    `problems`: all errors found, each with a message and a place. `place`: that of the first one. `__cause__`: the
    exception of the body, if any.
    """

    def __init__(self, program: str, problems: Sequence[Problem]) -> None:
        super().__init__(
            "\n".join(f"program {program!r}: {_with_location(problem.text, problem.place)}" for problem in problems)
        )
        self.program = program
        self.problems = tuple(problems)
        self.place = self.problems[0].place if self.problems else None


class DependsOnValue(CompileError):
    """The next step of the body depends on a value that is known at run time only, so the program has no single graph.

    If the value is an argument, pass it to `compile`; otherwise run the program without compiling it.
    """


class Problem(NamedTuple):
    """One error of a program: its message, and the line."""

    text: str
    place: SourceLocation | None


def unreadable_value(
    program: str, variable: str | None, attempts: Sequence[Attempt], place: SourceLocation | None
) -> UnreadableValue:
    """Returns the error for a generated text that cannot be parsed. `place`: the line of its gen."""
    last = attempts[-1]
    count = "" if len(attempts) == 1 else f"{len(attempts)} attempts failed; the last one: "
    text = _with_location(f"{_subject(program, variable)}: {count}{last.reason}", place)
    error = UnreadableValue(text, program=program, variable=variable, generated=last.text, attempts=attempts)
    error.place = place
    return error


def program_error(
    program: str, variable: str | None, cause: BaseException, place: SourceLocation | None = None
) -> ProgramError:
    """Returns a ProgramError for `cause`, which names the program, the variable and the line."""
    message = str(cause)
    text = f"{_subject(program, variable)}: {type(cause).__name__}{': ' + message if message else ''}"
    error = ProgramError(_with_location(text, place), program=program, variable=variable)
    error.place = place
    error.__cause__ = cause
    return error


def missing_variable(program: str, name: str, existing: Iterable[str]) -> MissingVariable:
    """Returns the error for reading variable `name` of a program with the `existing` variables."""
    names, place = sorted(existing), caller_location()
    known = f"it has {', '.join(map(repr, names))}" if names else "it has no variables yet"
    text = f"program {program!r}: there is no variable {name!r}{did_you_mean(name, names)}; {known}"
    error = MissingVariable(_with_location(text, place), program=program, variable=name)
    error.place = place
    return error


def _subject(program: str, variable: str | None) -> str:
    return f"program {program!r}" + (f", variable {variable!r}" if variable is not None else "")


def _with_location(text: str, place: SourceLocation | None) -> str:
    return text if place is None else f"{text} (at {place})"


def unknown_keyword(where: str, name: str, known: Iterable[str]) -> InputError:
    """Returns the error for a keyword that `where` (such as "gen") does not have.

    >>> str(unknown_keyword("gen", "temprature", ["temperature"]))
    "gen has no keyword 'temprature' (did you mean 'temperature'?); known are: temperature"
    """
    if name in UNSUPPORTED_KEYWORDS:
        return InputError(f"{where}: {name!r} is not supported: {UNSUPPORTED_KEYWORDS[name]}")
    names = list(known)
    if name in NAMES_ELSEWHERE:
        return InputError(f"{where} has no keyword {name!r}: {NAMES_ELSEWHERE[name]}")
    return InputError(f"{where} has no keyword {name!r}{did_you_mean(name, names)}; known are: {', '.join(names)}")


_PER_GEN_ONLY = "a constraint belongs to one gen; pass it to that gen"
UNSUPPORTED_KEYWORDS = {
    **dict.fromkeys(("json_schema", "schemas", "ebnf", "lark", "constraint", "complete"), _PER_GEN_ONLY),
    "use_thread": "calls always run in parallel to the body; the only supported value is True, in run",
    "num_api_spec_tokens": "plait has no speculative execution for API models",
}

NAMES_ELSEWHERE = {  # keywords of other libraries -> what to write here
    "max_completion_tokens": "write max_tokens=...",
    "do_sample": "write temperature=0 for the likeliest token, or a temperature above 0 to sample",
    "num_beams": "write plait.beam(s, width, gen(...))",
    "best_of": "write plait.best_of(s, n, gen(...), by=...)",
    "logprobs": "write return_logprob=True, and top_logprobs_num=...",
    "top_logprobs": "write return_logprob=True, and top_logprobs_num=...",
    "stop_words": "write stop=[...]",
    "stop_sequences": "write stop=[...]",
    "stop_tokens": "write stop_token_ids=[...]",
    "pattern": "write regex=...",
    "guided_regex": "write regex=...",
    "guided_json": "write json_schema=...",
    "guided_choice": "write choices=[...]",
    "grammar": "write ebnf=... (GBNF) or lark=...",
    "schema": "write json_schema=..., or type=... for a Python type",
    "json": "write json_schema=..., or constraint=JsonObject() of plait.constrained",
    "response_model": "write type=...",
    "output_type": "write type=...",
    "response_format": "write json_schema=..., or type=... for a Python type",
    "max_retries": "write retries=...",
    "functions": "write tools=[...]",
    "options": "write choices=[...]",
    "enable_thinking": 'write run(..., chat_template_kwargs={"enable_thinking": ...})',
    "chat_template_kwargs": "it belongs to all turns of a program: give it to run",
    "max_workers": "write num_threads=..., or max_concurrency=... in arun_batch",
    "concurrency": "write num_threads=..., or max_concurrency=... in arun_batch",
}
