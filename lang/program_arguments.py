"""The arguments of a program: checked against its parameters, and separated from the sampling keywords of `run`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.lang.errors import NAMES_ELSEWHERE, UNSUPPORTED_KEYWORDS, unknown_keyword
from plait.lang.sampling_options import RUN_OPTION_KEYWORDS
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

RUN_KEYWORDS = ("stream", "backend", "budget")


def named_arguments(body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that `body(s, *args, **kwargs)` gets, defaults included, by the names of its parameters."""
    bound = inspect.signature(body).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


class ProgramArguments:
    """The parameters of a program, and the arguments that `bind` has set.

    signature: that of the program's body, whose first parameter is the state.
    """

    def __init__(self, program_name: str, signature: inspect.Signature, bound: Mapping[str, Any]) -> None:
        self.program_name = program_name
        self.signature = signature
        self.bound = dict(bound)
        self.names = list(signature.parameters)[1:]

    def split_sampling(self, where: str, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the sampling keywords of method `where`, and the other keywords.

        A name that is a parameter of the program is its argument; the sampling keyword of that name is in the dict
        `sampling=`.
        """
        others = dict(kwargs)
        explicit = None if "sampling" in self.names else others.pop("sampling", None)
        explicit = {} if explicit is None else explicit
        if not isinstance(explicit, Mapping) or not all(isinstance(name, str) for name in explicit):
            raise InputError(f"{where}: sampling must be a dict of sampling keywords, not {explicit!r:.80}")
        given = {name: others.pop(name) for name in RUN_OPTION_KEYWORDS if name in others and name not in self.names}
        for name in explicit:
            if name not in RUN_OPTION_KEYWORDS:
                raise unknown_keyword(f"{where}: sampling", name, RUN_OPTION_KEYWORDS)
            if name in given:
                raise InputError(f"{where}: {name} is given twice, also in sampling; leave one out")
        return given | dict(explicit), others

    def only_sampling(self, where: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sampling keywords of a method that takes no other ones, since its items have the arguments."""
        sampling, others = self.split_sampling(where, kwargs)
        for name in others:
            if name in self.names and name in RUN_OPTION_KEYWORDS:
                raise InputError(
                    f"{where}: {name!r} is a parameter of program {self.program_name!r}: give it in each item, or the "
                    f"sampling keyword as sampling={{{name!r}: ...}}"
                )
            raise unknown_keyword(where, name, RUN_OPTION_KEYWORDS)
        return sampling

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
