"""`BatchActor`: one process of a cluster. It imports the program, starts an engine, and runs items that it is sent.

It gets and returns text and bytes only. Ray calls its methods in several threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from plait.lang.adapters import adapter_of_block
from plait.lang.backends.default_backend import as_client, set_default_backend
from plait.lang.batches.saved_values import ValueCodec
from plait.lang.budget import Budget
from plait.lang.cluster.item_results import encode_result
from plait.lang.cluster.program_reference import ProgramReference, import_program
from plait.lang.execution.execution import Execution
from plait.lang.sampling_options import run_options
from plait.runtime.errors import InputError, PlaitError, RuntimeGone
from plait.runtime.messages import Welcome


class Work(msgspec.Struct, frozen=True):
    """What an actor does: the program, its model, the settings of the engine, and the keywords of `run_batch`."""

    program: ProgramReference
    model: str | None = None
    settings: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    budget: Budget | None = None  # of each item
    environment: dict[str, str] = {}  # variables of the engine's process
    adapter: str = msgspec.field(default_factory=lambda: adapter_of_block() or "")  # of the whole program


def encode_work(work: Work) -> bytes:
    """Returns the work as MessagePack. Raises InputError for a keyword that is not plain data."""
    try:
        return msgspec.msgpack.encode(work)
    except (TypeError, OverflowError) as error:
        raise InputError(f"the settings of a cluster and the keywords of its batches are plain data: {error}") from None


class Engine(Protocol):
    """A Runtime, or what tests use instead."""

    @property
    def client(self) -> Any: ...


def start_runtime(model: str | None, settings: Mapping[str, Any]) -> Engine:
    from plait.runtime.process.runtime import Runtime

    return Runtime(model, progress=False, **settings)


class BatchActor:
    """Runs items of one batch. `start` comes first, then `run_item`, several at a time."""

    def __init__(
        self, work: bytes, start_engine: Callable[[str | None, Mapping[str, Any]], Engine] = start_runtime
    ) -> None:
        self._work = msgspec.msgpack.decode(work, type=Work)
        self._start_engine = start_engine

    def start(self) -> str:
        """Starts the engine. Returns JSON: its `welcome`, or the `error` for which it cannot start."""
        work = self._work
        os.environ.update(work.environment)
        try:
            self._program = import_program(work.program)
            self._engine = self._start_engine(work.model, work.settings)  # kept, since it ends with the object
            self._client = as_client(self._engine)
            self._options = replace(run_options("run_batch", work.sampling), adapter=work.adapter)
            self._options.check_as_defaults(self._client.model.vocab_size)
        except PlaitError as error:
            return json.dumps({"error": [type(error).__name__, str(error)]})
        except Exception as error:  # of the program's file
            return json.dumps({"error": ["InputError", f"{work.program}: {type(error).__name__}: {error}"]})
        set_default_backend(self._client)  # for programs that the program runs
        self._codec = ValueCodec(self._program._body)
        return json.dumps({"welcome": msgspec.to_builtins(self._client.model), "pid": os.getpid()})

    def run_item(self, index: int, item: str) -> str:
        """Runs an item, a JSON object of arguments. Returns its result, see `item_results`.

        Raises RuntimeGone if the engine has ended, and with it the use of this actor.
        """
        program = self._program
        execution = Execution(
            program.name, program._body, (), json.loads(item), self._client, self._options, self._work.budget, index
        )
        state = execution.run_batch_item()
        if self._client.is_closed:
            raise RuntimeGone(str(self._engine.client.disconnect_reason))
        return encode_result(state, self._codec)


def read_welcome(text: str) -> Welcome | tuple[str, str]:
    """Returns the model of an actor, or the class name and the text of the error for which it cannot start."""
    data = json.loads(text)
    if "error" in data:
        name, message = data["error"]
        return name, message
    return msgspec.convert(data["welcome"], Welcome)
