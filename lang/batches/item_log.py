"""What a batch keeps of its items, and what these are results of: one rule for `resume=` and for `plait batch`.

A result stands for an item as long as nothing that it depends on has changed: the program's source, the sampling
keywords, the name of the model, the arguments. `resume=` has a digest of all these in each line (`item_keys`).
`plait batch` writes lines for other programs to read: they hold the arguments as they are, and the rest is in a file
beside them (`batch_identity`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.lang.sampling_options import Options
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient

_FORMAT = "2"  # part of every key; 0.1.0 had none and saved texts and variables only


class ItemLog(Protocol):
    """Where the items of a batch are kept when they end."""

    def begin(self, client: BackendClient) -> Mapping[int, ProgramState]:
        """Called before an item runs. Returns the states of those that need not. Raises InputError for a wrong file."""

    def record(self, index: int, state: ProgramState) -> None:
        """Keeps an item that has ended, with or without an error. From any thread."""


def batch_identity(
    program: str, body: Callable[..., Any], bound: Mapping[str, Any], options: Options
) -> dict[str, str]:
    """Returns what all results of a batch depend on, except for the model, as digests. bound: arguments of `bind`."""
    values = {name: value if is_json(value) else type(value).__name__ for name, value in bound.items()}
    return {"program": _digest([program, _source(body), values]), "sampling keywords": _digest(_sampling(options))}


def item_keys(
    program: str, body: Callable[..., Any], items: Sequence[Mapping[str, Any]], options: Options, model: str
) -> list[str]:
    """Returns the key of each item: a digest of all that its result depends on. Equal items are counted."""
    shared = [_FORMAT, program, _source(body), model, *_sampling(options)]
    counts: Counter[str] = Counter()
    keys = []
    for index, item in enumerate(items):
        if not is_json(dict(item)):
            raise InputError(f"item {index} of run_batch has arguments that are not JSON values, as resume requires")
        digest = _digest([shared, dict(item)])[:32]
        keys.append(f"{digest}-{counts[digest]}")
        counts[digest] += 1
    return keys


def model_name(client: BackendClient) -> str:
    """Returns the name of a model, by which it is known again on another machine."""
    return Path(client.model.model_path).name


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sampling(options: Options) -> list[Any]:
    values: list[Any] = [sorted(options.fields.items(), key=lambda field: field[0]), options.n]
    values += [] if options.same_seed is None else [options.same_seed]
    values += [options.template_variables] if options.template_variables else []
    return values + ([options.adapter] if options.adapter else [])


def _source(body: Callable[..., Any]) -> str:
    """Returns the source code of the body. For a body made by `plait.agent`, returns the agent's settings instead."""
    settings = getattr(body, "settings_text", None)
    if isinstance(settings, str):
        return settings
    try:
        return inspect.getsource(body)
    except (OSError, TypeError):  # a function that was typed into an interactive session has no source file
        code = getattr(body, "__code__", None)
        return "" if code is None else repr(code.co_code) + repr(code.co_consts)


def is_json(value: Any) -> bool:
    """Returns whether writing a value as JSON and reading it gives the same value (no tuples, objects, NaN, inf)."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in (str, int, bool)
