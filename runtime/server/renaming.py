"""The one validator of sampling parameters, speaking in the names that a protocol has for them.

Knows: names. Must not know: protocols, ranges.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.sampling import SamplingParams, sampling_params
from plait.runtime.server.errors import invalid


def sampling_named(
    said: Mapping[str, str], at: str = "", outside: Collection[str] = (), **fields: Any
) -> SamplingParams:
    """Checked sampling parameters; what is None is the default.

    `said`: our name -> the protocol's. `at`: where they stand in the body; those `outside` stand at its top.
    ApiError names the parameter as the client wrote it.

    >>> sampling_named({"max_tokens": "num_predict"}, "options", max_tokens=3).max_tokens
    3
    """
    try:
        return sampling_params(**fields)
    except InputError as error:
        text = str(error)
        first = text.partition(" ")[0]
        param: str | None
        if first in said or first in SamplingParams.__struct_fields__:
            name = said.get(first, first)
            param = f"{at}.{name}" if at and first not in outside else name
        else:
            param = _blamed(text, said, at)
        sentence = re.sub(r"\w+", lambda word: said.get(word[0], word[0]), text)
        raise invalid(sentence, param) from None


def _blamed(text: str, said: Mapping[str, str], at: str) -> str | None:
    """The parameter that a sentence speaks of without beginning with it: "stop strings must be ..."."""
    if "stop string" in text:
        name = said.get("stop", "stop")
        return f"{at}.{name}" if at else name
    return at or None
