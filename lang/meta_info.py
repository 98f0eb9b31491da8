"""`GenMeta` and `SelectMeta`, the results of `get_meta_info`: dicts with SGLang's keys, and their attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from plait.runtime.sampling.choice_scores import choice_probabilities, mean

if TYPE_CHECKING:
    from plait.runtime.call_reports import ExactInfo
    from plait.runtime.client.call import CallResult, ScoredChoices
    from plait.runtime.tokenizer.tokenizer import Tokenizer

# One token as (logprob, token id, text). A token that is part of a character has U+FFFD in its text.
Logprob = tuple[float, int, str]


class FinishReasonMeta(TypedDict):
    """Why a call ended: `type` "length" is max_tokens; `matched` is the stop string or stop token, if one ended it."""

    type: Literal["stop", "length"]
    matched: str | int | None


class CallMeta(dict[str, Any]):
    """The meta info of one call: a dict, so `meta["prompt_tokens"]` is `meta.prompt_tokens`.

    - `finish_reason`: {"type": "stop" or "length", "matched": the stop string or token id, or None}.
    - `prompt_tokens` = `cached_tokens` (found in the prefix cache) + `computed_tokens`. `recomputed_tokens` were
      computed again because the KV cache was full.
    - `completion_tokens`: sampled or forced. `forced_tokens` of them followed from the constraint, `drafted_tokens`
      were accepted drafts, `reasoning_tokens` came before the value (`think`).
    - `queue_s`, `ttft_s`, `wall_s`: seconds until the call was admitted, until its first token, and in total.
      `compile_s`: the part of queue_s in which it waited for its constraint.

    An attribute that was not requested is None; as a key it is missing.
    """

    finish_reason: FinishReasonMeta
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    completion_tokens: int
    forced_tokens: int
    drafted_tokens: int
    reasoning_tokens: int
    queue_s: float
    ttft_s: float
    wall_s: float
    compile_s: float

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            if not name.startswith("_") and any(name in cls.__annotations__ for cls in (type(self), CallMeta)):
                return None
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has {', '.join(self)}")


class AttemptMeta(TypedDict):
    """One attempt of a gen with `retries`: its text, and why it was refused (None: it was accepted)."""

    text: str
    error: str | None
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int


class ExactMeta(TypedDict):
    """How an `exact` value was drawn. All logarithms are natural.

    - `logprob`: of the value without the constraint, at the temperature and filters of the gen.
    - `constrained_logprob`: the same under the constraint, [lowest, highest]. The bounds close with further samples.
    - `constraint_mass`: [lowest, highest] probability that an unconstrained text of the model is valid.
    - `model_steps`: prefixes whose probabilities were computed for this value; under a mask one for each token.
    """

    logprob: float
    constrained_logprob: list[float]
    constraint_mass: list[float]
    model_steps: int


class ParticlesMeta(TypedDict):
    """How a value with `particles` was drawn. All logarithms are natural.

    - `log_weight`: of Z, an unbiased estimate of the probability that unconstrained text is valid; Z is also the
      importance weight of the value.
    - `logprob`: of the value without the constraint, at the temperature and filters of the gen.
    - `constrained_logprob`: the same given that the text is valid, logprob - log_weight.
    - `effective_sample_size`: how many equally weighted particles the complete ones were worth.
    - `resamplings`: how often the particles were drawn anew by their weights.
    - `model_steps`: prefixes whose probabilities were computed; under a mask one for each token.
    - `constraint_checks`: tokens that the constraint checked one by one, and `checks_per_token`, these for each model
      step. `masks`: how often a mask of all tokens was needed instead.
    """

    log_weight: float
    logprob: float
    constrained_logprob: float
    effective_sample_size: float
    resamplings: int
    model_steps: int
    constraint_checks: int
    checks_per_token: float
    masks: int


class GenMeta(CallMeta):
    """The meta info of a gen: that of every call, and

    - with `return_logprob`: `output_token_logprobs`, one (logprob, token id, text) per sampled token, and
      `output_top_logprobs`, the list of the likeliest ones for each token;
    - with `logprob_start_len`: `input_token_logprobs` and `input_top_logprobs`, the same of the prompt;
    - with a lenient constraint: `violation`, the reason why the text is not valid, or None;
    - with a schema that has unknown formats: `warnings`, sentences about them;
    - with `exact`: an ExactMeta, the probability of the value; with `particles`: a ParticlesMeta; through a
      RuntimeEndpoint also `weight`, a dict with the logarithms that plait's server sends beside a drawn value;
    - with `retries`: `attempts`, a dict for each one with `text`, `error` (why it was refused, or None) and the counts.
      The other counts are sums over them.

    >>> meta = state.get_meta_info("answer")                         # doctest: +SKIP
    >>> meta.completion_tokens == meta["completion_tokens"]          # doctest: +SKIP
    True
    """

    output_token_logprobs: list[Logprob] | None
    output_top_logprobs: list[list[Logprob]] | None
    input_token_logprobs: list[Logprob] | None
    input_top_logprobs: list[list[Logprob]] | None
    violation: str | None
    warnings: list[str] | None
    attempts: list[AttemptMeta] | None
    exact: ExactMeta | None
    particles: ParticlesMeta | None


class SelectMeta(CallMeta):
    """The meta info of a select: that of every call, and these lists in the order of the choices.

    - `choices`, and `choice_scores`: the highest one won.
    - `choice_probabilities`: the likelihoods of the choices, scaled to the sum 1; with
      unconditional_likelihood_normalized they are calibrated against an empty prompt.
    - `normalized_prompt_logprobs`: the mean logprob of the tokens of each choice. `input_token_logprobs`: these tokens
      as (logprob, token id, text); the first may begin in the text before ("It is " and "red": " red").
    - `normalized_unconditional_prompt_logprobs`, `unconditional_token_logprobs`: the same without the prompt, for
      unconditional_likelihood_normalized.
    - `method`: "structured output" where a service chose that cannot score; then the scores are None.
    """

    choices: list[str]
    choice_scores: list[float] | None
    choice_probabilities: list[float] | None
    normalized_prompt_logprobs: list[float] | None
    input_token_logprobs: list[list[Logprob]] | None
    normalized_unconditional_prompt_logprobs: list[float] | None
    unconditional_token_logprobs: list[list[float]] | None
    method: str | None


def generation_meta(result: CallResult, tokenizer: Tokenizer) -> GenMeta:
    """Returns the meta info of a gen."""
    meta = GenMeta(_common(result) | (result.extra_meta or {}))
    for side, logprobs in (("output", result.logprobs), ("input", result.prompt_logprobs)):
        if logprobs is not None:
            sampled, top = [(token.token_id, token.logprob) for token in logprobs], [token.top for token in logprobs]
            meta[f"{side}_token_logprobs"] = _entries(tokenizer, sampled)
            meta[f"{side}_top_logprobs"] = [_entries(tokenizer, tokens) for tokens in top]
    if result.lenient_constraint is not None:
        meta["violation"] = result.violation
    if result.warnings:
        meta["warnings"] = list(result.warnings)
    if result.exact is not None:
        meta["exact"] = _exact_meta(result.exact)
    if result.particles is not None:
        meta["particles"] = result.particles.report()
    return meta


def _exact_meta(exact: ExactInfo) -> ExactMeta:
    low, high = exact.mass_bounds
    bounds = [exact.logprob - log_mass for log_mass in reversed(exact.log_mass_bounds)]
    return ExactMeta(
        logprob=exact.logprob,
        constrained_logprob=bounds,
        constraint_mass=[low, high],
        model_steps=exact.model_steps,
    )


def choice_meta(result: CallResult, scored_choices: ScoredChoices | None, tokenizer: Tokenizer) -> SelectMeta:
    """Returns the meta info of a select."""
    if result.extra_meta is not None:  # a backend without a runtime made the choice
        return SelectMeta({**_common(result), **result.extra_meta})
    chosen = result.choice
    assert chosen is not None and scored_choices is not None, "a Select finished without its choice"
    meta = SelectMeta(_common(result))
    meta["choices"] = list(scored_choices.choices)
    meta["choice_scores"] = list(chosen.scores)
    meta["choice_probabilities"] = choice_probabilities(chosen.token_logprobs, chosen.unconditional_logprobs)
    meta["normalized_prompt_logprobs"] = [mean(logprobs) for logprobs in chosen.token_logprobs]
    meta["input_token_logprobs"] = [
        _entries(tokenizer, zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(scored_choices.token_ids, chosen.token_logprobs, strict=True)
    ]
    if chosen.unconditional_logprobs is not None:
        unconditional = chosen.unconditional_logprobs
        meta["normalized_unconditional_prompt_logprobs"] = [mean(logprobs) for logprobs in unconditional]
        meta["unconditional_token_logprobs"] = [list(logprobs) for logprobs in unconditional]
    return meta


def _common(result: CallResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "finish_reason": {"type": result.finish_reason, "matched": result.matched},
        **{name: getattr(usage, name) for name in usage.__struct_fields__},
    }


def _entries(tokenizer: Tokenizer, tokens: Iterable[tuple[int, float]]) -> list[Logprob]:
    token_bytes = tokenizer.vocabulary.token_bytes
    return [(logprob, token, token_bytes[token].decode(errors="replace")) for token, logprob in tokens]
