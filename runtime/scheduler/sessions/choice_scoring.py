"""Select: which rows score a list of choices, and which choice wins.

A choice of m tokens needs the logits at m positions: after the prompt, and after each of its tokens but the
last. Choices that begin alike share a row's positions, so only the maximal beginnings become rows.

The three methods are SGLang's published ones. Knows: token ids and logprobs. Must not know: when rows run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from plait.runtime.batch.request import ScoringRequest, Selection
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import ChoiceScores, Select
from plait.runtime.scheduler.sessions.session import Session


def make_selection(session: Session, message: Select, cache: PrefixCache) -> Selection:
    """The Select with its rows, which are still to be added to the waiting."""
    num_prompt = len(session.seq) - message.replaced
    made = Selection(session, message.call, message.choices, message.method, num_prompt, message.top_logprobs)
    _add_requests(made, cache, int(session.seq.tokens.view()[0]))
    return made


def _add_requests(selection: Selection, cache: PrefixCache, bos: int) -> None:
    """Gives `selection` the rows that score its choices; `bos` is all that stands before the unconditional ones."""
    prefixes, selection.request_of_choice = _group_by_prefix(selection.choices)
    session, num_prompt = selection.session, selection.num_prompt
    wanted: list[dict[int, set[int]]] = [defaultdict(set) for _ in prefixes]
    for row, choice in zip(selection.request_of_choice, selection.choices, strict=True):
        for offset, token in enumerate(choice):
            wanted[row][offset].add(token)
    for tokens, targets in zip(prefixes, wanted, strict=True):
        seq = cache.fork(session.seq)
        cache.truncate_idle(seq, num_prompt)
        seq.tokens.extend(tokens)
        selection.requests.append(_scoring_request(selection, seq, num_prompt - 1, targets))
        if selection.method == "unconditional_likelihood_normalized":
            alone = Sequence(session.seq.namespace, [bos, *tokens])
            selection.unconditional_requests.append(_scoring_request(selection, alone, 0, targets))
    selection.num_unfinished = len(selection.requests) + len(selection.unconditional_requests)


def _scoring_request(selection: Selection, seq: Sequence, first: int, targets: dict[int, set[int]]) -> ScoringRequest:
    at = {first + offset: tuple(sorted(ids)) for offset, ids in targets.items()}
    return ScoringRequest(selection.session, selection.call_id, seq, first, at, selection)


def _group_by_prefix(choices: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Beginnings (choices less their last token) that are not the beginning of another, and whose row each choice
    reads. In sorted order a beginning's extensions follow it, so the first one not before it will do."""
    ordered = sorted({tuple(choice[:-1]) for choice in choices})
    following: list[tuple[int, ...] | None] = [*ordered[1:], None]
    maximal = [b for b, after in zip(ordered, following, strict=True) if after is None or after[: len(b)] != b]
    request_of_choice = [bisect_left(maximal, tuple(choice[:-1])) for choice in choices]
    return [list(b) for b in maximal], request_of_choice


def best_choice(selection: Selection) -> ChoiceScores:
    """Scores every choice by the selection's method. Ties go to the earlier choice.

    token_length_normalized: mean logprob of the choice's tokens. unconditional_likelihood_normalized: mean of
    logprob minus the token's logprob without the prompt. greedy_token_selection: token by token, the choices
    that do not have the best next token drop out; where a choice has ended, its mean stands in.
    """
    logprobs = _choice_logprobs(selection, selection.requests, selection.num_prompt - 1)
    unconditional = None
    if selection.method == "greedy_token_selection":
        scores = _greedy_scores(logprobs)
    elif selection.method == "unconditional_likelihood_normalized":
        unconditional = _choice_logprobs(selection, selection.unconditional_requests, 0)
        scores = [
            sum(p - q for p, q in zip(with_prompt, without, strict=True)) / len(with_prompt)
            for with_prompt, without in zip(logprobs, unconditional, strict=True)
        ]
    else:
        scores = [sum(each) / len(each) for each in logprobs]
    index = max(range(len(scores)), key=lambda i: (scores[i], -i))
    return ChoiceScores(
        index, scores, logprobs, unconditional, _choice_top_logprobs(selection) if selection.top_logprobs else None
    )


def _choice_top_logprobs(selection: Selection) -> list[list[list[tuple[int, float]]]]:
    """The likeliest tokens where token j of choice i stands."""
    first = selection.num_prompt - 1
    return [
        [selection.requests[row].top[first + j] for j in range(len(choice))]
        for row, choice in zip(selection.request_of_choice, selection.choices, strict=True)
    ]


def _choice_logprobs(selection: Selection, rows: list[ScoringRequest], first: int) -> list[list[float]]:
    """logprobs[i][j] of token j of choice i."""
    return [
        [rows[row].logprobs[first + j, token] for j, token in enumerate(choice)]
        for row, choice in zip(selection.request_of_choice, selection.choices, strict=True)
    ]


def _greedy_scores(logprobs: list[list[float]]) -> list[float]:
    """1.0 for each choice that is still in when all have ended, less for those that dropped out earlier."""
    longest = max(len(each) for each in logprobs)
    padded = [each + [sum(each) / len(each)] * (longest - len(each)) for each in logprobs]
    left, scores = list(range(len(logprobs))), [0.0] * len(logprobs)
    for position in range(longest):
        best = max(padded[i][position] for i in left)
        left = [i for i in left if padded[i][position] == best]
        for i in left:
            scores[i] = (position + 1) / longest
        if len(left) == 1:
            break
    for i in left:
        scores[i] = 1.0
    return scores
