"""The one validator of sampling parameters, speaking in the names that a protocol has for them.

Knows: names. Must not know: protocols, ranges.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.sampling_params import SamplingParams, sampling_params
from plait.runtime.server.errors import invalid


def sampling_params_from_fields(
    protocol_names: Mapping[str, str], path: str = "", top_level: Collection[str] = (), **fields: Any
) -> SamplingParams:
    """Checked sampling parameters; what is None is the default.

    `protocol_names`: our name -> the protocol's. `path`: where they stand in the body; those `top_level` stand at its top.
    ApiError names the parameter as the client wrote it.

    >>> sampling_params_from_fields({"max_tokens": "num_predict"}, "options", max_tokens=3).max_tokens
    3
    """
    try:
        return sampling_params(**fields)
    except InputError as error:
        text = str(error)
        first = text.partition(" ")[0]
        param: str | None
        if first in protocol_names or first in SamplingParams.__struct_fields__:
            name = protocol_names.get(first, first)
            param = f"{path}.{name}" if path and first not in top_level else name
        else:
            param = _param_in_message(text, protocol_names, path)
        sentence = re.sub(r"\w+", lambda word: protocol_names.get(word[0], word[0]), text)
        raise invalid(sentence, param) from None


def _param_in_message(text: str, protocol_names: Mapping[str, str], path: str) -> str | None:
    """The parameter that a sentence speaks of without beginning with it: "stop strings must be ..."."""
    if "stop string" in text:
        name = protocol_names.get("stop", "stop")
        return f"{path}.{name}" if path else name
    return path or None
