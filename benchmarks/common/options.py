"""The options of a script, which its docstring explains."""

from __future__ import annotations

import argparse
from typing import Any


def parsed(doc: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """Returns the options of the command line, by name; --help prints `doc`.

    `defaults`: the others, each of the type of its default. False makes a switch; None is a text that is not given.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=str if default is None else type(default), default=default)
    return parser.parse_args()
