"""The dicts of `get_meta_info`: the result of one call under SGLang's keys, and some keys of plait's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.lang.choices import choice_probabilities

if TYPE_CHECKING:
    from plait.runtime.client.call import CallResult, ScoredChoices
    from plait.runtime.messages import TokenLogprob
    from plait.runtime.tokenizer.tokenizer import Tokenizer

# One token as (logprob, token id, text). A token that is part of a character has U+FFFD in its text.
Logprob = tuple[float, int, str]


def generation_meta(result: CallResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the meta info of a gen.

    With `return_logprob`: `output_token_logprobs` (one `Logprob` per sampled token) and `output_top_logprobs` (a list
    of them per token). With `logprob_start_len`: `input_token_logprobs` and `input_top_logprobs`. With a lenient
    constraint: `violation`, the reason why the text is not valid, or None. With a schema that has unknown formats:
    `warnings`, a list of sentences about them.
    """
    meta = _common(result) | (getattr(result, "extra_meta", None) or {})
    if result.logprobs is not None:
        meta["output_token_logprobs"] = [
            _token_logprob(tokenizer, token.token_id, token.logprob) for token in result.logprobs
        ]
        meta["output_top_logprobs"] = [_top(tokenizer, token) for token in result.logprobs]
    if result.prompt_logprobs is not None:
        meta["input_token_logprobs"] = [
            _token_logprob(tokenizer, token.token_id, token.logprob) for token in result.prompt_logprobs
        ]
        meta["input_top_logprobs"] = [_top(tokenizer, token) for token in result.prompt_logprobs]
    if result.lenient_constraint is not None:
        meta["violation"] = result.violation
    if result.warnings:
        meta["warnings"] = list(result.warnings)
    return meta


def choice_meta(result: CallResult, scored_choices: ScoredChoices | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the meta info of a select. Every list is in the order of the choices.

    `choice_scores`: the scores; the highest one won. `choice_probabilities`: see the function of this name.
    `normalized_prompt_logprobs`: the mean logprob of the tokens of each choice. `input_token_logprobs`: these tokens;
    the first may begin in the text before ("It is " and "red": " red"). The keys with `unconditional`: the same without
    the prompt, for unconditional_likelihood_normalized.
    """
    extra_meta = getattr(result, "extra_meta", None)
    if extra_meta is not None:  # a backend without a runtime made the choice
        return {**_common(result), **extra_meta}
    chosen = result.choice
    assert chosen is not None and scored_choices is not None, "a Select finished without its choice"
    meta = _common(result)
    meta["choices"] = list(scored_choices.choices)
    meta["choice_scores"] = list(chosen.scores)
    meta["choice_probabilities"] = choice_probabilities(chosen.token_logprobs, chosen.unconditional_logprobs)
    meta["normalized_prompt_logprobs"] = [_mean(logprobs) for logprobs in chosen.token_logprobs]
    meta["input_token_logprobs"] = [
        [_token_logprob(tokenizer, token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs in zip(scored_choices.token_ids, chosen.token_logprobs, strict=True)
    ]
    if chosen.unconditional_logprobs is not None:
        unconditional = chosen.unconditional_logprobs
        meta["normalized_unconditional_prompt_logprobs"] = [_mean(logprobs) for logprobs in unconditional]
        meta["unconditional_token_logprobs"] = [list(logprobs) for logprobs in unconditional]
    return meta


def _common(result: CallResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "finish_reason": {"type": result.finish_reason, "matched": result.matched},
        **{name: getattr(usage, name) for name in usage.__struct_fields__},
    }


def _top(tokenizer: Tokenizer, token: TokenLogprob) -> list[Logprob]:
    return [_token_logprob(tokenizer, token_id, logprob) for token_id, logprob in token.top]


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> Logprob:
    return logprob, token_id, tokenizer.vocabulary.token_bytes[token_id].decode("utf-8", errors="replace")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
