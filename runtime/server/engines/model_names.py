"""Names of served models: their form, and further names (aliases), checked once when the server starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

DEFAULT_NAME = "default"  # of the first model, in every protocol
OLLAMA_TAG = ":latest"  # Ollama's clients add it to a name, and it is removed again
MAX_ALIASES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


class Alias(NamedTuple):
    """A further name of a model. target: a model's name, "default" for the first model, or another alias. where: what
    it was read from, for messages."""

    name: str
    target: str
    where: str


def check_name(where: str, name: str) -> None:
    """Raises InputError unless `name` can be the name of a model."""
    if not _NAME.fullmatch(name) or name == DEFAULT_NAME or name.endswith(OLLAMA_TAG):
        raise InputError(
            f"{where}: {name!r:.100} cannot be a model's name: it has letters, digits and ._:/@+-, "
            f"is not '{DEFAULT_NAME}' and does not end with '{OLLAMA_TAG}'"
        )


def alias_options(options: Sequence[str]) -> list[Alias]:
    """Reads options such as `gpt-4=small`. Raises InputError.

    >>> alias_options(["gpt-4=small"])[0][:2]
    ('gpt-4', 'small')
    """
    aliases = []
    for option in options:
        name, separator, target = option.partition("=")
        if not separator or not target:
            raise InputError(f"--alias {option!r:.100} names no model; write NAME=MODEL")
        aliases.append(Alias(name, target, f"--alias {option:.100}"))
    return aliases


def adapter_options(options: Sequence[str]) -> dict[str, str]:
    """Reads options such as `sql=adapters/sql`. Raises InputError.

    >>> adapter_options(["sql=adapters/sql"])
    {'sql': 'adapters/sql'}
    """
    folders: dict[str, str] = {}
    for option in options:
        name, separator, folder = option.partition("=")
        if not separator or not folder:
            raise InputError(f"--lora {option!r:.100} names no folder or file; write NAME=PATH")
        check_name(f"--lora {option!r:.100}", name)
        if name in folders:
            raise InputError(f"--lora {option!r:.100}: the name {name!r} is taken by another adapter")
        folders[name] = folder
    return folders


def resolve_aliases(aliases: Sequence[Alias], models: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the aliases of each of `models` by its name.

    Raises InputError for a name that is taken or cannot be one, an unknown target, and aliases of each other.

    >>> resolve_aliases([Alias("a", "b", ""), Alias("b", "small", "")], ["small", "large"])
    {'small': ('a', 'b'), 'large': ()}
    """
    if len(aliases) > MAX_ALIASES:
        raise InputError(f"there are {len(aliases)} aliases; {MAX_ALIASES} are allowed")
    targets: dict[str, str] = {}
    for name, target, where in aliases:
        check_name(where, name)
        if name in models or name in targets:
            raise InputError(f"{where}: the name {name!r} is taken by {'a model' if name in models else 'an alias'}")
        targets[name] = models[0] if target == DEFAULT_NAME else target
    names: dict[str, tuple[str, ...]] = dict.fromkeys(models, ())
    for name, _, where in aliases:
        model, path = targets[name], {name}
        while model in targets and model not in path:
            path.add(model)
            model = targets[model]
        if model in path:
            raise InputError(f"{where}: the alias {name!r} leads to the alias {model!r} again, and to no model")
        if model not in names:
            raise InputError(f"{where}: there is no model {model!r:.100}{did_you_mean(model, models)}")
        names[model] += (name,)
    return names
