"""Whether the runtime finishes an answer that has to be JSON before its tokens run out.

Knows: constraints, sampling parameters, and what a request says of it. Must not know: protocols, tokens.
"""

from __future__ import annotations

import msgspec

from plait.constrained.specs import JsonObject, JsonSchema, Spec, Structural
from plait.runtime.sampling_params import SamplingParams, check_sampling
from plait.runtime.server.errors import invalid


def with_json_completion(
    sampling: SamplingParams, constraint: Spec | None, requested: bool | None = None
) -> SamplingParams:
    """The parameters with `complete` as `requested` says. Where nothing is asked, JSON and tool calls are finished where a
    whole value fits at all, and unless stop strings, patterns or tokens were given, which may cut it.

    Raises ApiError for `complete` without a constraint, and InputError beside what would cut the value.

    >>> finishing(SamplingParams(), JsonObject()).complete
    True
    """
    if requested and constraint is None:
        raise invalid("'complete' needs a constraint, such as response_format or regex", "complete")
    if requested is None:
        is_cut = bool(sampling.stop or sampling.stop_token_ids or sampling.stop_regex)
        requested = isinstance(constraint, JsonSchema | JsonObject | Structural) and not is_cut
        if_it_fits = True
    else:
        if_it_fits = isinstance(constraint, Structural) and constraint.free_text
    if not requested:
        return sampling
    made = msgspec.structs.replace(sampling, complete=True, if_it_fits=if_it_fits)
    check_sampling(made)
    return made
