"""What an actor returns for an item: a finished run in the form of `resume=` files, or its error, as JSON text.

An error reaches the caller without pickle. It keeps its class, its text, its variable and its place. Its cause keeps
its class if that is an error of plait or of Python with plain arguments; any other cause becomes a `LostCause` with its
text.
"""

from __future__ import annotations

import builtins
import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plait.lang.batches.saved_runs import decode_run, encode_run
from plait.lang.batches.saved_values import CannotSave, ValueCodec
from plait.lang.budget import BudgetExceeded
from plait.lang.cluster.program_reference import FILE_MODULE
from plait.lang.core.branch import Branch
from plait.lang.core.run import Run
from plait.lang.errors import Attempt, MissingVariable, ProgramError, ToolError, UnreadableValue, program_error
from plait.lang.sampling_options import Options
from plait.lang.source_location import SourceLocation
from plait.lang.states.state import ProgramState
from plait.runtime import errors
from plait.runtime.errors import CallFailed, InputError, PlaitError, call_failed
from plait.runtime.portable_error import LostCause

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient


class ClusterCodec(ValueCodec):
    """A ValueCodec of the caller: it knows the program's file as the module that it is here, such as `__main__`."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__(body)
        self._module = str(body.__module__)

    def _lookup(self, name: list[str]) -> Any:
        return super()._lookup([self._module, name[1]] if name[0] == FILE_MODULE else name)


def encode_result(state: ProgramState, codec: ValueCodec) -> str:
    """Returns the result of an item that has ended. A value that has no form in JSON is an error of the item."""
    error = state._run.error or state.error()
    if error is None:
        try:
            return json.dumps({"run": encode_run(state, codec)})
        except CannotSave as cannot:
            text = f"{cannot}, which an actor cannot return; keep its text, or a value of plain data"
            error = program_error(state._run.program, None, InputError(text))
    return json.dumps({"error": encode_error(error)})


def decode_result(program: str, client: BackendClient, result: str, codec: ValueCodec) -> ProgramState:
    """Returns the state of a result. A class that is not here is an error of the item."""
    data = json.loads(result)
    if "error" in data:
        return failed_state(program, client, decode_error(data["error"]))
    try:
        return decode_run(program, client, data["run"], codec)
    except CannotSave as cannot:
        text = f"the actor returned a value of {cannot}; its class must be known to the caller too"
        return failed_state(program, client, program_error(program, None, InputError(text)))


def failed_state(program: str, client: BackendClient, error: ProgramError) -> ProgramState:
    """Returns the state of an item that failed with this error."""
    run = Run(program, client, Options())
    branch = Branch(run)
    run.fail(error)
    run.end()
    return ProgramState(branch, is_external=True)


# -- errors ---------------------------------------------------------------------------------------


_PROGRAM_ERRORS: dict[str, type[ProgramError]] = {"ProgramError": ProgramError, "MissingVariable": MissingVariable}
_PLAIN_TYPES = (str, int, float, bool, type(None))
_OWN_ERRORS: dict[str, type[PlaitError]] = {"BudgetExceeded": BudgetExceeded, "ToolError": ToolError} | {
    name: getattr(errors, name)
    for name in ("InputError", "ModelError", "ModelNotFound", "CorruptModel", "UnsupportedModel", "PlaitError")
}
MAX_CAUSES = 8


def encode_error(error: ProgramError) -> dict[str, Any]:
    """Returns the error and its causes as JSON data."""
    return _encoded_program_error(error, MAX_CAUSES) | {"traceback": "".join(traceback.format_exception(error))}


def _encoded_program_error(error: ProgramError, depth: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kind": type(error).__name__,
        "text": str(error),
        "program": error.program,
        "variable": error.variable,
        "place": None if error.place is None else [error.place.filename, error.place.lineno],
        "cause": _encoded_cause(error.__cause__, depth - 1),
    }
    if isinstance(error, UnreadableValue):
        data |= {"generated": error.text, "attempts": [list(attempt) for attempt in error.attempts]}
    return data


def _encoded_cause(cause: BaseException | None, depth: int) -> dict[str, Any] | None:
    if cause is None or depth == 0:
        return None
    name, text = type(cause).__name__, str(cause)
    if isinstance(cause, ProgramError):
        return {"program_error": _encoded_program_error(cause, depth)}
    if isinstance(cause, CallFailed):
        return {"call_failed": cause.kind, "text": text}
    if _OWN_ERRORS.get(name) is type(cause):
        return {"plait": name, "text": text}
    if getattr(builtins, name, None) is type(cause) and all(type(value) in _PLAIN_TYPES for value in cause.args):
        return {"builtin": name, "arguments": list(cause.args)}
    return {"lost": f"{name}: {text}" if text else name}


def decode_error(data: Mapping[str, Any]) -> ProgramError:
    """Returns the error of data that `encode_error` returned; `traceback_text` is the traceback on the actor."""
    error = _decoded_program_error(data)
    error.traceback_text = str(data["traceback"])
    error.add_note(f"The traceback on the actor:\n{error.traceback_text.rstrip()}")
    return error


def _decoded_program_error(data: Mapping[str, Any]) -> ProgramError:
    names = {"program": data["program"], "variable": data["variable"]}
    error: ProgramError
    if data["kind"] == "UnreadableValue":
        attempts = [Attempt(*attempt) for attempt in data["attempts"]]
        error = UnreadableValue(data["text"], **names, generated=data["generated"], attempts=attempts)
    else:
        error = _PROGRAM_ERRORS.get(data["kind"], ProgramError)(data["text"], **names)
    error.place = None if data["place"] is None else SourceLocation(*data["place"])
    error.__cause__ = None if data["cause"] is None else _decoded_cause(data["cause"])
    return error


def _decoded_cause(data: Mapping[str, Any]) -> BaseException:
    match data:
        case {"program_error": inner}:
            return _decoded_program_error(inner)
        case {"call_failed": kind, "text": text}:
            return call_failed(kind, text)
        case {"plait": name, "text": text}:
            return plait_error(name, text)
        case {"builtin": name, "arguments": arguments}:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):  # an actor names no other code
                with suppress(TypeError):  # a class that takes other arguments than it keeps, as UnicodeDecodeError
                    return kind(*arguments)
            return LostCause(f"{name}: {', '.join(map(str, arguments))}")
    return LostCause(data["lost"])


def plait_error(name: str, text: str) -> PlaitError:
    """Returns the error of plait with this class name, a PlaitError for an unknown one."""
    return _OWN_ERRORS.get(name, PlaitError)(text)
