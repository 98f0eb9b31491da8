"""Sampling parameters of a request: the struct that decodes them, and their checked values, from the one table."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from plait.runtime.errors import InputError
from plait.runtime.sampling_params import (
    NAMES,
    PARAMS,
    SamplingParams,
    json_type,
    name_in,
    sampling_params,
)
from plait.runtime.sampling_values import MAX_LOGIT_BIAS
from plait.runtime.server.errors import invalid


def sampling_fields(
    protocol: str, *, leave_out: Collection[str] = (), base: type[msgspec.Struct] = msgspec.Struct
) -> type[msgspec.Struct]:
    """A struct with the sampling parameters of `protocol`, all optional, to be the base of a request.

    `leave_out`: fields of `SamplingParams` that this part of the request does not have. A subclass declares again what
    has another type in its protocol.

    >>> sampling_fields("ollama").__struct_fields__[:2]
    ('num_predict', 'temperature')
    """
    fields: list[tuple[str, Any, Any]] = []
    for field, name in NAMES[protocol].items():
        if field not in leave_out:
            fields.append((name, Annotated[json_type(field) | None, Meta(description=PARAMS[field].doc)], None))
    return msgspec.defstruct(
        f"{protocol.title()}SamplingFields",
        fields,
        bases=(base,),
        module=__name__,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def read_sampling_params(
    body: msgspec.Struct, protocol: str, *, path: str = "", top_level: Collection[str] = (), **values: Any
) -> SamplingParams:
    """Checked sampling parameters of a request: those of `values`, then the body's; None is the default.

    `path`: the location of `body` in the request. `top_level`: fields that are at the top level of the request instead.
    Raises ApiError 400, which names the parameter as the client wrote it.
    """
    body_values = {field: getattr(body, name) for field, name in NAMES[protocol].items() if field not in values}
    return checked_sampling_params(protocol, path=path, top_level=top_level, **body_values, **values)


def checked_sampling_params(
    protocol: str, *, path: str = "", top_level: Collection[str] = (), **values: Any
) -> SamplingParams:
    """`sampling_params(...)` with errors as ApiError 400; see `read_sampling_params`.

    >>> checked_sampling_params("ollama", path="options", max_tokens=3).max_tokens
    3
    """
    if values.get("logit_bias") is not None:
        values["logit_bias"] = _token_bias(values["logit_bias"], _param(protocol, "logit_bias", path, top_level))
    try:
        return sampling_params(protocol, **values)
    except InputError as error:
        raise invalid(str(error), _param(protocol, error.field, path, top_level)) from None


def _param(protocol: str, field: str | None, path: str, top_level: Collection[str]) -> str | None:
    """The parameter's place in the request."""
    if field is None:
        return path or None
    name = name_in(protocol, field)
    return name if field in top_level or not path else f"{path}.{name}"


def _token_bias(bias: dict[str, float], param: str | None) -> dict[int, float]:
    """JSON has texts as keys; token ids have fewer than 10 digits."""
    if len(bias) > MAX_LOGIT_BIAS:  # before the keys are converted
        raise invalid(f"'logit_bias' takes at most {MAX_LOGIT_BIAS} token ids, not {len(bias)}", param)
    if not all(re.fullmatch(r"[0-9]{1,9}", key) for key in bias):
        raise invalid("the keys of 'logit_bias' are token ids", param)
    return {int(key): value for key, value in bias.items()}
