"""Runs a program's body once with no model, and gives the graph of what it did.

Knows: arguments, the body, what it raises. Must not know: what a graph is made into.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.lang.aio.running import refuse_inside_a_loop
from plait.lang.compiled.check import problems_of
from plait.lang.compiled.graph import Graph
from plait.lang.compiled.states import AsyncTapeState, TapeState
from plait.lang.compiled.tape import Tape, TapeStrand
from plait.lang.compiled.unknown import Argument, Env, NotKnown
from plait.lang.errors import CompileError, DependsOnValue, Problem, ProgramError
from plait.lang.options import Options
from plait.lang.place import place_of, place_of_code
from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.runtime.tokenizer.chat_template import ChatTemplate


def compile_body(
    name: str, body: Callable[..., Any], bound: inspect.BoundArguments, defaults: Options, template: ChatTemplate | None
) -> Graph:
    """The graph of `body`, called once with the arguments that are known. Raises CompileError."""
    tape = Tape(name, defaults, template)
    parameters = _fill(bound, tape)
    returned = _carried_out(body, TapeStrand(tape), bound)
    problems = problems_of(tape)
    del returned  # until here: a branch that the caller gets is not lost
    if problems:
        raise CompileError(name, problems)
    place = place_of_code(getattr(inspect.unwrap(body), "__code__", None))
    return Graph(name, tuple(tape.nodes), tuple(tape.lanes), parameters, defaults, place)


def _fill(bound: inspect.BoundArguments, tape: Tape) -> tuple[str, ...]:
    """Gives the body an unknown value for each argument that it needs and was not given; their names."""
    missing = []
    for name, parameter in list(bound.signature.parameters.items())[1:]:
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in bound.arguments and parameter.default is parameter.empty and not is_open:
            bound.arguments[name] = _argument(tape, name)
            missing.append(name)
    return tuple(missing)


def _argument(tape: Tape, name: str) -> NotKnown:
    def evaluate(env: Env) -> Any:
        return env.argument(name)

    return NotKnown(tape.marks, name, frozenset([Argument(name)]), evaluate, (), None, True)


def _carried_out(body: Callable[..., Any], strand: TapeStrand, bound: inspect.BoundArguments) -> Any:
    """What the body returns."""
    tape, is_async = strand.run, inspect.iscoroutinefunction(body)
    if is_async:
        refuse_inside_a_loop("compile the program outside of it, or in a thread")
    try:
        if is_async:
            returned = asyncio.run(body(AsyncTapeState(strand), *bound.args[1:], **bound.kwargs))
        else:
            returned = body(TapeState(strand), *bound.args[1:], **bound.kwargs)
    except Exception as error:
        if tape.marks.refused is not None:
            raise tape.marks.refused from (None if error is tape.marks.refused else error)
        raise _failed(tape, error) from error
    finally:
        tape.end()
    if tape.marks.refused is not None:  # the body has caught it
        raise tape.marks.refused
    return returned


def _failed(tape: Tape, error: Exception) -> CompileError:
    """What the body raised, as what is wrong with the program."""
    text, place = str(error), place_of(error)
    if tape.marks.is_in(text):
        hint = "; in a text it can stand as f'{value}'" if "str instance" in text else ""
        text = f"a value that only a run knows is used where a known one is needed: {tape.marks.readable(text)}{hint}"
        return DependsOnValue(tape.program, [Problem(text, place)])
    if isinstance(error, ProgramError) and error.program == tape.program:
        text = text.removeprefix(f"program {tape.program!r}: ").removesuffix(f" (at {error.place})")
    elif not isinstance(error, PlaitError):
        text = f"the body raised {type(error).__name__}{': ' + text if text else ''}"
    return CompileError(tape.program, [Problem(text, place)])
