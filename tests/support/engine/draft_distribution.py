"""Compares sampled outputs with the model's exact distribution, without and with drafts, free and masked.

    PYTHONPATH=tests/support/engine python tests/support/engine/draft_distribution.py 100000

prints the chi-square statistic of so many outputs of three tokens in each of the six cases: without drafts, with those
of a proposer that knows the model, and with those of a draft model that is often wrong.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter

import msgspec
import numpy as np
import torch
from fake_engine import VOCAB, logits_after, make_engine_loop, run_until_idle, spell, state_of, vocabulary
from noisy_drafts import draft_model

from plait.constrained import Regex, compile_grammar
from plait.runtime.drafts.prompt_lookup import PromptLookup
from plait.runtime.drafts.proposer import AcceptanceRates, Guess
from plait.runtime.messages import Append, Close, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy import drafts

PROMPT, LENGTH, TEMPERATURE = spell("hello"), 3, 1.3
MASKED = Regex("[abcx][aby ][acd]")
CASES = ("nothing", "a proposer", "a draft model")
CALLS_AT_ONCE = 12
MIN_EXPECTED = 10.0  # outputs of a cell; the others are counted as one


def allowed_tokens(is_masked):
    """The tokens of each position of the output."""
    return [spell(letters) for letters in ("abcx", "aby ", "acd")] if is_masked else [list(range(VOCAB))] * LENGTH


@functools.cache
def exact_distribution(is_masked):
    """{output: probability}, from the logits alone."""
    distribution = {(): 1.0}
    for allowed in allowed_tokens(is_masked):
        distribution = {
            (*begin, token): probability * share
            for begin, probability in distribution.items()
            for token, share in zip(allowed, shares_after(begin, allowed), strict=True)
        }
    return distribution


def shares_after(begin, allowed):
    """The probabilities of the allowed tokens after the prompt and `begin`."""
    logits = logits_after(state_of([*PROMPT, *begin])).double().numpy()[allowed] / TEMPERATURE
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()).tolist()


def sampled(num_outputs, is_masked, drafts_of, patch):
    """Counts of outputs, of the seeds 0, 1, ...; and the accepted draft tokens. drafts_of: one of `CASES`."""
    grammars = {MASKED: compile_grammar(MASKED, vocabulary())}
    model = draft_model(error_rate=0.3) if drafts_of == "a draft model" else None
    engine_loop, transport, _ = make_engine_loop(
        prompt_lookup=drafts_of == "a proposer", grammars=grammars, draft_model=model
    )
    engine_loop.config = msgspec.structs.replace(engine_loop.config, check_integrity=False)  # it takes most of the time
    allowed = allowed_tokens(is_masked)

    def likeliest(self, text, forced_end):
        tokens = text.tolist()
        return [Guess(max(allowed[len(tokens) - len(PROMPT)], key=logits_after(state_of(tokens)).__getitem__), 0)]

    patch(PromptLookup, "guesses", likeliest)
    patch(AcceptanceRates, "rate", lambda self, level: 0.9)  # drafts in spite of all that are refused
    patch(drafts, "DRAFT_TOKEN_COST", 0.01)
    counts, num_drafted = Counter(), 0
    for first in range(0, num_outputs, CALLS_AT_ONCE):
        transport.outbox.clear()
        messages = []
        for seed in range(first, min(num_outputs, first + CALLS_AT_ONCE)):
            params = sampling_params(max_tokens=LENGTH, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
            generate = Generate(seed, seed, params, MASKED if is_masked else None)
            messages += [Open(seed), Append(seed, PROMPT), generate, Close(seed)]
        for call in run_until_idle(engine_loop, transport, *messages).values():
            counts[tuple(call.tokens)] += 1
            num_drafted += call.end.usage.drafted_tokens
    return counts, num_drafted


def chi_square(counts, distribution):
    """(statistic, degrees of freedom, probability of as large a one) of counts of outputs."""
    total = sum(counts.values())
    assert counts.keys() <= distribution.keys()
    large = [output for output, probability in distribution.items() if probability * total >= MIN_EXPECTED]
    observed = np.array([counts[output] for output in large] + [total - sum(counts[output] for output in large)])
    shares = [distribution[output] for output in large]
    expected = total * np.array([*shares, 1 - sum(shares)])
    kept = expected > 1e-6
    statistic = float((((observed - expected) ** 2)[kept] / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(halves[0], halves[1]))


def main():
    for is_masked, drafts_of in itertools.product((False, True), CASES):
        counts, num_drafted = sampled(int(sys.argv[1]), is_masked, drafts_of, setattr)
        statistic, freedom, p = chi_square(counts, exact_distribution(is_masked))
        print(
            f"{'masked' if is_masked else 'free'}, drafts of {drafts_of}: chi-square "
            f"{statistic:.1f} at {freedom} degrees of freedom (p = {p:.3f}); {num_drafted} draft tokens accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
