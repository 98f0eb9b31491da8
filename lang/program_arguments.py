"""The arguments of a program: checked against its parameters, and separated from the sampling keywords of `run`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.lang.errors import NAMES_ELSEWHERE, UNSUPPORTED_KEYWORDS, unknown_keyword
from plait.lang.sampling_options import RUN_OPTION_KEYWORDS, Options, run_options
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

RUN_KEYWORDS = ("stream", "backend", "budget")


class ProgramArguments:
    """The parameters of a program, and the arguments that `bind` has set.

    signature: that of the program's body, whose first parameter is the state.
    """

    def __init__(self, program_name: str, signature: inspect.Signature, bound: Mapping[str, Any]) -> None:
        self.program_name = program_name
        self.signature = signature
        self.bound = dict(bound)
        self.names = list(signature.parameters)[1:]

    def split_sampling(self, where: str, kwargs: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Returns the sampling keywords of method `where` as options, and the other keywords."""
        sampling = {name: value for name, value in kwargs.items() if name in RUN_OPTION_KEYWORDS}
        for name in sampling:
            if where in ("run", "compile") and name in self.names:
                raise InputError(
                    f"program {self.program_name!r} has a parameter {name!r}, which is also a sampling keyword of "
                    f"{where}; pass it by position, or rename it"
                )
        return run_options(where, sampling), {k: v for k, v in kwargs.items() if k not in sampling}

    def with_bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `kwargs` and the bound arguments that neither `args` nor `kwargs` override."""
        by_position = self.names[: len(args)]
        return {name: value for name, value in self.bound.items() if name not in by_position} | dict(kwargs)

    def check(self, where: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, allow_missing: bool = False) -> None:
        """Raises InputError unless the arguments fit the signature. `allow_missing`: required ones may be missing."""
        bind = self.signature.bind_partial if allow_missing else self.signature.bind
        try:
            bind(None, *args, **self.with_bound(args, kwargs))
        except TypeError as error:
            names = self.names
            for name in kwargs:
                if name not in names and (name in UNSUPPORTED_KEYWORDS or name in NAMES_ELSEWHERE):
                    raise unknown_keyword(where, name, names) from None
            unknown = [name for name in kwargs if name not in names]
            keywords = (*RUN_KEYWORDS, *RUN_OPTION_KEYWORDS)
            hint = did_you_mean(unknown[0], (*names, *keywords)) if unknown else ""
            if unknown and unknown[0] in keywords:
                hint = f" ({unknown[0]!r} is a keyword of run and run_batch, not an argument of the program)"
            got = f", but got {unknown[0]!r}" if unknown and repr(unknown[0]) not in str(error) else ""
            known = f"its parameters are {', '.join(names)}" if names else "it takes no arguments"
            raise InputError(f"{where}: {error}{got}{hint}; {known}") from None

    def takes(self, name: str) -> bool:
        """Whether the program takes an argument of this name."""
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.signature.parameters.values())
        return takes_any or name in self.names

    def check_bind(self, arguments: Mapping[str, Any]) -> None:
        """Raises InputError if `arguments` of `bind` have a name that the program does not take."""
        if not all(map(self.takes, arguments)):
            self.check(f"bind of program {self.program_name!r}", (), arguments, allow_missing=True)

    def checked_items(self, batch_kwargs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the arguments of each item of `run_batch`. Raises InputError if they do not fit the signature."""
        if isinstance(batch_kwargs, (str, bytes, Mapping)) or not isinstance(batch_kwargs, Iterable):
            raise InputError("run_batch takes a list of dicts, one dict of keyword arguments per item")
        items = []
        for index, item in enumerate(batch_kwargs):
            if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
                raise InputError(f"item {index} of run_batch must be a dict of keyword arguments, not {item!r:.80}")
            self.check(f"program {self.program_name!r}, item {index}", (), item)
            items.append(self.with_bound((), item))
        return items
