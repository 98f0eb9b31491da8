"""Decides whether the runtime completes a constrained answer, such as JSON, before its token limit."""

from __future__ import annotations

import msgspec

from plait.constrained.specs import Content, JsonObject, JsonSchema, JsonString, Lark, Reasoning, Spec, Structural
from plait.runtime.sampling_params import SamplingParams, check_sampling
from plait.runtime.server.errors import invalid


def with_json_completion(
    sampling: SamplingParams, constraint: Spec | None, requested: bool | None = None
) -> SamplingParams:
    """Returns `sampling` with `complete` set.

    `requested`: the request's own `complete`. By default (None) JSON and tool calls are completed if a whole value fits
    within the token limit, unless stop strings, patterns or tokens may cut it, or a call contains a text of a grammar:
    of that the search for a shortest text may find none, and calls would always seem too long.

    Raises ApiError for `complete` without a constraint, and InputError for `complete` with a stop condition.

    >>> with_json_completion(SamplingParams(), JsonObject()).complete
    True
    """
    if isinstance(constraint, Reasoning):
        constraint = constraint.then
    if requested and constraint is None:
        raise invalid("'complete' needs a constraint, such as response_format or regex", "complete")
    if requested is None:
        may_be_cut = bool(sampling.stop or sampling.stop_token_ids or sampling.stop_regex)
        is_completed = isinstance(constraint, JsonSchema | JsonObject) or (
            isinstance(constraint, Structural) and not any(_has_grammar(call.content) for call in constraint.calls)
        )
        requested = is_completed and not may_be_cut
        if_it_fits = True
    else:
        if_it_fits = isinstance(constraint, Structural) and constraint.free_text
    if not requested:
        return sampling
    completing = msgspec.structs.replace(sampling, complete=True, if_it_fits=if_it_fits)
    check_sampling(completing)
    return completing


def _has_grammar(content: Content) -> bool:
    return isinstance(content.of if isinstance(content, JsonString) else content, Lark)
