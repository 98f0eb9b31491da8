"""The table of sampling parameters: what an entry holds, and the entries of a struct by their stage.

A struct of parameters has one `Param` in the annotation of each field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_type_hints

import msgspec

Stage = Literal["logits", "filter", "draw", "logprobs", "output"]
SAMPLER_STAGES: tuple[Stage, ...] = ("logits", "filter", "draw", "logprobs")
"""The stages that a sampler computes; the scheduler is responsible for "output"."""


@dataclass(frozen=True)
class Param:
    """The properties of a parameter in addition to its type and default.

    `protocols`: those that have the parameter, with the protocol's name for it if that differs from the field
    ("gen sglang=min_new_tokens"):

        gen                 keywords of `gen` and of a program's `run`
        programs            /v1/programs
        openai, responses   /v1/completions and /v1/chat/completions, /v1/responses
        anthropic           /v1/messages
        ollama              `options` of /api/generate and /api/chat
        sglang              `sampling_params` of /generate
        openai_client       what the language backends OpenAI and LiteLLM send
        anthropic_client    what the language backend Anthropic sends

    `low`, `high`: the range of a number; `low` itself is allowed unless `above_low`.
    `json_type`: the type in a request, if it differs from the field's.
    `stage`: what the parameter changes (required):

        logits      the logits, before they become probabilities
        filter      which tokens can be sampled, by their probabilities or ranks
        draw        which of these tokens is sampled
        logprobs    whether the sampler returns logprobs
        output      when the output ends, how long the call may take, and what else it returns
    """

    doc: str
    protocols: str = ""
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    json_type: Any = None
    _: KW_ONLY
    stage: Stage


def params_of(kind: type[msgspec.Struct]) -> dict[str, Param]:
    """Returns the `Param` of each field. Raises TypeError for a field without one."""
    types = get_type_hints(kind, include_extras=True)
    params = {}
    for name in kind.__struct_fields__:
        found = [item for item in get_args(types[name]) if isinstance(item, Param)]
        if len(found) != 1:
            raise TypeError(f"the sampling parameter {name!r} needs one Param in its annotation, not {len(found)}")
        params[name] = found[0]
    return params


@functools.cache
def fields_of_stages(kind: type[msgspec.Struct], *stages: Stage) -> tuple[str, ...]:
    """Returns the names of the parameters of these stages.

    >>> from plait.runtime.sampling_params import SamplingParams
    >>> fields_of_stages(SamplingParams, "filter")
    ('top_p', 'top_k', 'min_p', 'typical_p')
    """
    return tuple(name for name, param in params_of(kind).items() if param.stage in stages)


def is_any_set(params: msgspec.Struct, fields: tuple[str, ...]) -> bool:
    """Returns whether a field has another value than its default."""
    read, defaults = _reader(type(params), fields)
    return bool(read(params) != defaults)


@functools.cache
def _reader(kind: type[msgspec.Struct], fields: tuple[str, ...]) -> tuple[Callable[[Any], Any], Any]:
    """Returns a function that reads the fields of an instance, and its result for the defaults."""
    read: Callable[[Any], Any] = attrgetter(*fields) if fields else lambda params: ()
    return read, read(kind())
