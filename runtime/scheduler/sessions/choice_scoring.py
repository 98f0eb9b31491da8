"""Select: builds the requests that score a list of choices, and picks the best choice.

A choice of m tokens needs the logits at m positions: after the prompt, and after each of its tokens but the last.
Choices with a common prefix share these positions, so one request is made for each maximal prefix only.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate

import msgspec

from plait.runtime.batch.request import ScoringRequest, Selection
from plait.runtime.call_reports import ChoiceScores, TokenLogprob, encode_logprobs
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Select
from plait.runtime.sampling.choice_scores import score_choices
from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.scheduler.sessions.session import Session


def make_selection(session: Session, message: Select, cache: PrefixCache) -> Selection:
    """Returns the Selection with its requests, which the caller adds to the batch scheduler."""
    num_prompt = len(session.seq) - message.replaced
    seed = secrets.randbits(63) if message.seed is None else message.seed
    selection = Selection(
        session.owner, message.call, message.choices, message.method, num_prompt, message.top_logprobs, seed
    )
    _add_requests(selection, session.seq, cache)
    return selection


def _add_requests(selection: Selection, session_seq: Sequence, cache: PrefixCache) -> None:
    """Adds the requests that score the choices. The unconditional ones have only the first token as their prompt."""
    prefixes, selection.request_of_choice = _maximal_prefixes(selection.choices)
    num_prompt, bos = selection.num_prompt, session_seq.tokens.at(0)
    targets_of: list[dict[int, set[int]]] = [defaultdict(set) for _ in prefixes]
    for index, choice in zip(selection.request_of_choice, selection.choices, strict=True):
        for offset, token in enumerate(choice):
            targets_of[index][offset].add(token)
    for tokens, targets in zip(prefixes, targets_of, strict=True):
        seq = cache.fork(session_seq)
        cache.truncate_idle(seq, num_prompt)
        seq.tokens.extend(tokens)
        selection.requests.append(_scoring_request(selection, seq, num_prompt - 1, targets))
        if selection.method == "unconditional_likelihood_normalized":
            unconditional_seq = Sequence(session_seq.namespace, [bos, *tokens])
            selection.unconditional_requests.append(_scoring_request(selection, unconditional_seq, 0, targets))
    selection.num_unfinished = len(selection.requests) + len(selection.unconditional_requests)


def _scoring_request(selection: Selection, seq: Sequence, first: int, targets: dict[int, set[int]]) -> ScoringRequest:
    """`first`: the position of the last prompt token. `targets`: tokens by their offset in the choice."""
    targets_at = {first + offset: tuple(sorted(token_ids)) for offset, token_ids in targets.items()}
    return ScoringRequest(selection.owner, selection.call_id, seq, first, targets_at, selection)


def _maximal_prefixes(choices: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Returns the choices' prefixes (without their last token) that no other prefix extends.

    Also returns for each choice the index of the one that covers it. In sorted order, the extensions of a prefix
    directly follow it, so the first maximal prefix that is not smaller covers it.
    """
    prefixes = sorted({tuple(choice[:-1]) for choice in choices})
    following: list[tuple[int, ...] | None] = [*prefixes[1:], None]
    maximal = [
        prefix
        for prefix, after in zip(prefixes, following, strict=True)
        if after is None or after[: len(prefix)] != prefix
    ]
    request_of_choice = [bisect_left(maximal, tuple(choice[:-1])) for choice in choices]
    return [list(prefix) for prefix in maximal], request_of_choice


def best_choice(selection: Selection) -> ChoiceScores:
    """Scores every choice by the selection's method (`sampling/choice_scores.py`), and selects one."""
    logprobs, unconditional = _choice_logprobs(selection, selection.requests, selection.num_prompt - 1), None
    if selection.method == "unconditional_likelihood_normalized":
        unconditional = _choice_logprobs(selection, selection.unconditional_requests, 0)
    scores = score_choices(selection.method, logprobs, unconditional)
    is_sampled = selection.method == "exact"
    index = _draw(scores, hash_uniform(selection.seed, 0)) if is_sampled else scores.index(max(scores))
    top_logprobs = _choice_top_logprobs(selection, logprobs) if selection.top_logprobs else None
    return ChoiceScores(index, scores, logprobs, unconditional, top_logprobs)


def _choice_top_logprobs(selection: Selection, logprobs: list[list[float]]) -> list[list[msgspec.Raw]]:
    """result[i]: the tokens of choice i with the most likely tokens at their positions; see `ChoiceScores`."""
    first = selection.num_prompt - 1
    return [
        encode_logprobs(
            [
                TokenLogprob(token, logprob, selection.requests[index].top[first + j])
                for j, (token, logprob) in enumerate(zip(choice, choice_logprobs, strict=True))
            ]
        )
        for index, choice, choice_logprobs in zip(selection.request_of_choice, selection.choices, logprobs, strict=True)
    ]


def _choice_logprobs(selection: Selection, requests: list[ScoringRequest], first: int) -> list[list[float]]:
    """result[i][j]: the logprob of token j of choice i."""
    return [
        [requests[index].logprobs[first + j, token] for j, token in enumerate(choice)]
        for index, choice in zip(selection.request_of_choice, selection.choices, strict=True)
    ]


def _draw(probabilities: list[float], uniform: float) -> int:
    """The first choice where the cumulative probabilities exceed `uniform`; never one of probability 0."""
    cumulative = list(accumulate(probabilities))
    target = uniform * cumulative[-1]
    return next(index for index, total in enumerate(cumulative) if total > target)
