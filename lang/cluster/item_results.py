"""What an actor returns for an item: a finished run in the form of `resume=` files, or its error, as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.lang.batches.saved_runs import decode_run, encode_run
from plait.lang.batches.saved_values import CannotSave, ValueCodec
from plait.lang.cluster.item_errors import decode_error, encode_error
from plait.lang.cluster.program_reference import FILE_MODULE
from plait.lang.core.branch import Branch
from plait.lang.core.run import Run
from plait.lang.errors import ProgramError, program_error
from plait.lang.sampling_options import Options
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError

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
