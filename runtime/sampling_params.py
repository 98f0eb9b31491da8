"""The sampling parameters: for each its type, range, default, meaning, and name in every protocol.

`SamplingParams` is the table. Request structs, their OpenAPI schemas, argument checks, the keywords of `gen` and the
requests that language backends send are derived from it, so that a new parameter is one more entry there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from plait.runtime.errors import InputError
from plait.runtime.sampling_table import Param, fields_of_stages, is_any_set, params_of
from plait.runtime.sampling_values import (
    MAX_LOGIT_BIAS,
    MAX_STOP_PATTERNS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    check_logit_bias,
    check_stop_patterns,
    check_stop_strings,
    check_token_ids,
    check_top_k,
    checked_number,
)

MAX_TOKENS_LIMIT = 1 << 20
MAX_TOP_LOGPROBS = 128
MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_PARTICLES = 64
MAX_SEARCH_ROWS = 4  # prefixes that the search of `exact` computes at once


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next tokens are chosen. Build it with `sampling_params(...)`, which checks every field.

    Logprobs are natural logarithms of the model's own distribution, before temperature, penalties and masks.
    """

    # fmt: off
    max_tokens: Annotated[int, Param(
        "Maximum number of tokens in the output",
        "gen programs openai responses=max_output_tokens anthropic ollama=num_predict sglang=max_new_tokens "
        "openai_client anthropic_client", 0, MAX_TOKENS_LIMIT, stage="output")] = 128
    min_tokens: Annotated[int, Param(
        "Minimum number of tokens in the output",
        "gen programs openai sglang=min_new_tokens", 0, MAX_TOKENS_LIMIT, stage="output")] = 0
    temperature: Annotated[float, Param(
        "Divides the logits; 0 selects the most likely token (greedy)",
        "gen programs openai responses anthropic ollama sglang openai_client anthropic_client", 0.0, 100.0,
        stage="draw")] = 1.0
    top_p: Annotated[float, Param(
        "Samples from the most likely tokens whose probabilities sum to this (nucleus sampling)",
        "gen programs openai responses anthropic ollama sglang openai_client anthropic_client",
        0.0, 1.0, above_low=True, stage="filter")] = 1.0
    top_k: Annotated[int, Param(
        "Samples from this many of the most likely tokens; -1: from all",
        "gen programs openai responses anthropic ollama sglang anthropic_client", stage="filter")] = -1
    min_p: Annotated[float, Param(
        "Samples from tokens whose probability is at least this fraction of the most likely token's",
        "gen programs openai responses ollama sglang", 0.0, 1.0, stage="filter")] = 0.0
    typical_p: Annotated[float, Param(
        "Samples from the tokens whose surprise is closest to the expected one, until their probabilities sum to this "
        "(locally typical sampling); of what top_k, top_p and min_p leave",
        "gen programs openai responses ollama sglang", 0.0, 1.0, above_low=True, stage="filter")] = 1.0
    frequency_penalty: Annotated[float, Param(
        "Subtracted from a token's logit for each time it is in the output",
        "gen programs openai ollama sglang openai_client", -2.0, 2.0, stage="logits")] = 0.0
    presence_penalty: Annotated[float, Param(
        "Subtracted once from the logit of each token that is in the output",
        "gen programs openai ollama sglang openai_client", -2.0, 2.0, stage="logits")] = 0.0
    repetition_penalty: Annotated[float, Param(
        "Divides the logit of a token that is in the prompt or the output, or multiplies it if it is negative; above 1 "
        "these tokens become less likely",
        "gen programs openai responses ollama=repeat_penalty sglang", 0.01, 100.0, stage="logits")] = 1.0
    repeat_last_n: Annotated[int, Param(
        "How many of the last tokens of prompt and output repetition_penalty applies to; -1: all of them, 0: none",
        "openai ollama", -1, MAX_TOKENS_LIMIT, stage="logits")] = -1
    stop: Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_STRINGS), Param(
        "A string or a list of strings; the output ends before the first of them",
        "gen programs openai responses anthropic=stop_sequences ollama sglang openai_client anthropic_client",
        json_type=str | list[str], stage="output")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS), Param(
        "The output ends before the first of these tokens",
        "gen programs openai sglang", json_type=list[int], stage="output")] = ()
    ignore_eos: Annotated[bool, Param(
        "The end token does not end the output",
        "gen programs openai responses sglang", stage="output")] = False
    seed: Annotated[int | None, Param(
        "The same seed gives the same output, in any batch",
        "gen programs openai responses ollama sglang=sampling_seed openai_client", -(2**63), 2**63 - 1,
        stage="draw")] = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS), Param(
        "Token id -> number added to its logit",
        "gen programs openai sglang openai_client", json_type=dict[str, float],
        stage="logits")] = msgspec.field(default_factory=dict)
    logprobs: Annotated[bool, Param(
        "Returns the logprob of every output token",
        "gen=return_logprob programs=return_logprob openai ollama sglang=return_logprob", stage="logprobs")] = False
    top_logprobs: Annotated[int, Param(
        "How many of the most likely tokens are returned at each position, with their logprobs",
        "gen=top_logprobs_num programs=top_logprobs_num openai responses ollama sglang=top_logprobs_num",
        0, MAX_TOP_LOGPROBS, stage="output")] = 0  # it has no effect on the sampler unless `logprobs` is on
    timeout_s: Annotated[float | None, Param(
        "Seconds after which the call fails",
        "gen=timeout programs=timeout openai=timeout responses=timeout sglang=timeout "
        "openai_client=timeout anthropic_client=timeout", 0.0, MAX_TIMEOUT_S, above_low=True, stage="output")] = None
    complete: Annotated[bool, Param(
        "The constrained value is complete within max_tokens; cannot be combined with stop, stop_token_ids and "
        "stop_regex, which would cut the value",
        "gen", stage="output")] = False
    prompt_logprobs_from: Annotated[int | None, Param(
        "Logprobs are also returned for the prompt tokens from this position on, except the first token; cached tokens "
        "are computed again",
        "gen=logprob_start_len sglang=logprob_start_len", 0, 1 << 24, stage="output")] = None
    stop_regex: Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_PATTERNS), Param(
        "A pattern or a list of patterns (Python syntax); the output ends where the first complete match begins",
        "gen programs openai sglang", json_type=str | list[str], stage="output")] = ()
    if_it_fits: Annotated[bool, Param(
        "With complete: if no complete value fits, max_tokens cuts the output; without if_it_fits such a call fails",
        stage="output")] = False
    token_healing: Annotated[bool | None, Param(
        "If a longer token begins with the text of the last prompt tokens, they are removed, and their text is sampled "
        "again together with what follows",
        "gen programs openai sglang", json_type=bool, stage="output")] = None
    exact: Annotated[bool, Param(
        "A constrained value is drawn from the model's own distribution, as if unconstrained values were sampled until "
        "one is valid; the tokens are sent when the value is complete",
        "gen programs openai responses ollama sglang", stage="draw")] = False
    particles: Annotated[int | None, Param(
        "A constrained value is drawn by sequential Monte Carlo with so many particles: its distribution tends to the "
        "model's own as they grow; the tokens are sent when the value is complete",
        "gen programs openai responses ollama sglang", 1, MAX_PARTICLES, stage="draw")] = None
    # fmt: on

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def samples_sequence(self) -> bool:
        """Whether a value is drawn as a whole, with `exact` or `particles`, and sent when it is complete."""
        return self.exact or self.particles is not None

    @property
    def max_rows(self) -> int:
        """The rows of a batch that one call can occupy at once: its particles, or the prefixes of its search."""
        return MAX_SEARCH_ROWS if self.exact else self.particles or 1

    @property
    def is_filtered(self) -> bool:
        """Whether only some of the tokens can be sampled, by their probabilities or ranks."""
        return is_any_set(self, fields_of_stages(type(self), "filter"))

    @property
    def needs_only_argmax(self) -> bool:
        """Whether the argmax of the logits is all that sampling needs."""
        return self.is_greedy and not is_any_set(self, fields_of_stages(type(self), "logits", "logprobs"))

    @property
    def has_penalties_or_bias(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return is_any_set(self, fields_of_stages(type(self), "logits"))

    @property
    def has_repetition_penalty(self) -> bool:
        """Whether the repetition penalty changes the logit of a token."""
        return self.repetition_penalty != 1.0 and self.repeat_last_n != 0

    def for_sample(self, index: int) -> SamplingParams:
        """Returns the parameters of sample `index` of n: its seed is seed + index, wrapped to 64 bits."""
        if not index or self.seed is None:
            return self
        seed = self.seed + index
        return msgspec.structs.replace(self, seed=seed if seed < 2**63 else seed - 2**64)


# -- the table's entries, by field and by protocol ------------------------------------------------


_TYPES = get_type_hints(SamplingParams, include_extras=True)
PARAMS: Mapping[str, Param] = params_of(SamplingParams)


def _names_by_protocol() -> dict[str, dict[str, str]]:
    names: dict[str, dict[str, str]] = {}
    for field, param in PARAMS.items():
        for entry in param.protocols.split():
            protocol, _, name = entry.partition("=")
            names.setdefault(protocol, {})[field] = name or field
    return names


NAMES: Mapping[str, Mapping[str, str]] = _names_by_protocol()
"""Protocol -> field -> the protocol's name for the field. Fields that a protocol does not have are missing."""


def json_type(field: str) -> Any:
    """Returns the type of a parameter in a request: the field's own unless the table has another."""
    return PARAMS[field].json_type or get_args(_TYPES[field])[0]


def name_in(protocol: str | None, field: str) -> str:
    """Returns the protocol's name for a field, or the field's own if the protocol has none.

    >>> name_in("sglang", "seed"), name_in(None, "seed")
    ('sampling_seed', 'seed')
    """
    return NAMES[protocol].get(field, field) if protocol else field


# -- checks ---------------------------------------------------------------------------------------

_FIELDS = SamplingParams.__struct_fields__
_FIELD_NAMES = frozenset(_FIELDS)
_DEFAULTS = msgspec.structs.astuple(SamplingParams())
_NUMBER_TYPES: dict[str, type[Any]] = {
    field: int if int in (json_type(field), *get_args(json_type(field))) else float
    for field, param in PARAMS.items()
    if param.low is not None
}
_BOOL_FIELDS = frozenset(field for field in _FIELDS if json_type(field) is bool)


def sampling_params(protocol: str | None = None, /, **fields: Any) -> SamplingParams:
    """Returns checked `SamplingParams`; `None` means the default.

    Raises InputError, with the field, for an unknown name, a wrong type, NaN, or a value out of range. Its text uses
    the names of `protocol`.

    >>> sampling_params(max_tokens=8, stop="\\n").stop
    ('\\n',)
    """
    unknown = fields.keys() - _FIELD_NAMES
    if unknown:
        raise InputError(f"unknown sampling parameter {sorted(unknown)[0]!r}; known are: {', '.join(_FIELDS)}")
    values = {name: value for name, value in fields.items() if value is not None}
    for name in ("stop", "stop_regex", "stop_token_ids"):
        if isinstance(values.get(name), (str, int)):
            values[name] = (values[name],)
        elif isinstance(values.get(name), (list, set, frozenset)):
            values[name] = tuple(values[name])
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = dict(values["logit_bias"])  # later changes by the caller have no effect
    for name, value in values.items():
        if name in _NUMBER_TYPES:
            values[name] = _checked_number(name, value, protocol)
    if values.get("repetition_penalty", 1.0) == 1.0:
        values.pop("repeat_last_n", None)  # the window of a penalty that there is not; the GPU's sampler has none
    params = SamplingParams(**values)
    check_sampling(params, protocol=protocol)
    return params


def check_sampling(params: SamplingParams, *, vocab_size: int | None = None, protocol: str | None = None) -> None:
    """Raises InputError unless every field has its type, is in range and, with a `vocab_size`, fits the vocabulary."""
    values = zip(_FIELDS, msgspec.structs.astuple(params), _DEFAULTS, strict=True)
    non_default = {name: value for name, value, default in values if value is not default}  # usually few
    for name, value in non_default.items():
        if name in _NUMBER_TYPES:
            kind, param = _NUMBER_TYPES[name], PARAMS[name]
            if value is not None and not (type(value) is kind and param.low < value < param.high):  # also if it is NaN
                _checked_number(name, value, protocol)
        elif name in _BOOL_FIELDS and not isinstance(value, bool):
            raise InputError(f"{name_in(protocol, name)} must be True or False, not {value!r}", field=name)
    if "top_k" in non_default:
        check_top_k(name_in(protocol, "top_k"), params.top_k)
    _check_combinations(params, protocol)
    if "stop" in non_default:
        check_stop_strings(name_in(protocol, "stop"), params.stop)
    if "stop_regex" in non_default:
        check_stop_patterns(name_in(protocol, "stop_regex"), params.stop_regex)
    if "stop_token_ids" in non_default:
        name = name_in(protocol, "stop_token_ids")
        check_token_ids("stop_token_ids", name, params.stop_token_ids, MAX_STOP_TOKENS, vocab_size)
    check_logit_bias(name_in(protocol, "logit_bias"), params.logit_bias, vocab_size)


def _checked_number(field: str, value: Any, protocol: str | None) -> Any:
    """Returns `value` as the type of the field. Raises InputError if it is not in the field's range."""
    param = PARAMS[field]
    assert param.low is not None and param.high is not None
    name, kind = name_in(protocol, field), _NUMBER_TYPES[field]
    return checked_number(field, name, value, kind, param.low, param.high, above_low=param.above_low)


def _check_combinations(params: SamplingParams, protocol: str | None) -> None:
    if params.min_tokens > params.max_tokens:
        low, high = name_in(protocol, "min_tokens"), name_in(protocol, "max_tokens")
        text = f"{low} ({params.min_tokens}) is above {high} ({params.max_tokens})"
        raise InputError(text, field="min_tokens")
    if params.top_logprobs and not params.logprobs and params.prompt_logprobs_from is None:
        text = f"{name_in(protocol, 'top_logprobs')} needs {name_in(protocol, 'logprobs')} to be on"
        raise InputError(text, field="top_logprobs")
    if params.token_healing and params.prompt_logprobs_from is not None:
        name = name_in(protocol, "prompt_logprobs_from")
        text = f"token_healing cannot be combined with {name}, because it removes tokens of the prompt"
        raise InputError(text, field="token_healing")
    if params.if_it_fits and not params.complete:
        raise InputError("if_it_fits needs complete to be on", field="if_it_fits")
    if params.complete and (params.stop or params.stop_token_ids or params.stop_regex):
        text = "complete cannot be combined with stop, stop_regex or stop_token_ids, which would cut the value"
        raise InputError(text, field="complete")
    if params.exact and params.particles is not None:
        raise InputError("exact cannot be combined with particles; choose one of them", field="particles")
    if params.samples_sequence:
        _check_sequence_sampling(params, "exact" if params.exact else "particles", protocol)


NOT_WITH_SEQUENCE_SAMPLING = (
    *("min_tokens", "stop", "stop_regex", "stop_token_ids", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logprobs", "prompt_logprobs_from"),
)


def _check_sequence_sampling(params: SamplingParams, option: str, protocol: str | None) -> None:
    """Raises InputError for parameters that `exact` and `particles` exclude.

    They would cut the value, make its probability depend on the order of the search, or select the most likely token.
    """
    for field in (name for name in NOT_WITH_SEQUENCE_SAMPLING if is_any_set(params, (name,))):
        raise InputError(f"{option} cannot be combined with {name_in(protocol, field)}", field=option)
    if params.token_healing:
        raise InputError(f"{option} cannot be combined with token_healing", field=option)
    if params.is_greedy:
        name = name_in(protocol, "temperature" if params.temperature == 0.0 else "top_k")
        text = f"{option} draws from a distribution: it needs a temperature above 0 and no top_k of 1; change "
        raise InputError(text + name, field=option)
