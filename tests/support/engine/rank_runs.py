"""Runs the same calls by one process and by several ranks, whose processes serve many models."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch
from fake_engine import EOS, LETTERS, ListTransport, ReadyCompiler, generate, outcomes, post
from tiny_hf_models import all_logits, text

from plait.constrained import Choices, Regex, Vocabulary, compile_grammar
from plait.runtime.config import engine_config
from plait.runtime.executor.distributed.make_rank_runner import RankGroup, make_rank_runner
from plait.runtime.executor.distributed.rank_runner import split_step
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.messages import PROTOCOL, Append, Close, Fork, Generate, Open, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop

WORDS, PATTERN = Choices(("a cat in the hat", "a car 123", "do")), Regex("[a-f]{3}( [0-9]{2})*!?")
PAGES = 50  # too few for all calls at once
VOCAB = 67  # divisible by none of the numbers of ranks
SETTINGS = dict(device="cpu", dtype="float32", weights="bf16", max_batch_tokens=32)


@functools.cache  # one, so that one process compiles the grammars of all runs
def vocabulary():
    letters = LETTERS + "#$%"
    token_bytes = (b"", *(letter.encode() for letter in letters[: VOCAB - 1]))
    return Vocabulary(token_bytes, (EOS,), lambda text: [1 + letters.index(c) for c in text if c in letters])


@contextlib.contextmanager
def rank_group(size):
    """The ranks 1 to size - 1 as processes; this process is rank 0. `group.losses`: why they could not go on."""
    losses = []
    ranks = RankGroup(size, losses.append)
    ranks.losses = losses
    try:
        yield ranks
    finally:
        if hasattr(ranks, "group"):
            ranks.group.close()
        ranks.close()


def rank_runner(ranks, path, stages=1, **settings):
    """The runner of the model at `path`, by the given ranks in so many stages."""
    sizes = dict(tensor_parallel_size=ranks.size // stages, pipeline_parallel_size=stages)
    config = engine_config(**SETTINGS | settings | sizes)
    return make_rank_runner(config, path, lambda fraction, doing: None, lambda: None, lambda size: ranks)


def single_runner(path, **settings):
    """The runner of the model at `path` in this process."""
    return make_runner(engine_config(**SETTINGS | settings), path)[0]


def run_calls(runner):
    """Runs many kinds of calls side by side; returns their outcomes, and (retractions, draft tokens)."""
    config = engine_config(max_batch_rows=6, check_integrity=True)
    transport, welcome = ListTransport(), Welcome(PROTOCOL, "", VOCAB, runner.max_session_tokens, 0)
    grammars = {spec: compile_grammar(spec, vocabulary()) for spec in (WORDS, PATTERN)}
    loop = EngineLoop(config, welcome, runner, Sampler(), vocabulary(), ReadyCompiler(grammars), transport)
    commit, drafts = loop.committer.commit, []
    loop.committer.commit = lambda batch, output: (drafts.append(batch.num_draft_tokens), commit(batch, output))
    post(transport, *calls())
    for _ in range(3000):
        loop.step(timeout_s=0.0)
        if not loop.has_work and not transport.inbox and not loop.calls.num_compiling:
            return outcomes(transport), (loop.status(0).retractions, sum(drafts))
    raise AssertionError("the engine loop did not become idle")


def calls():
    """Greedy calls with prompts that repeat, sampled, constrained and forked ones, and scores with logprobs."""
    for i in range(3):
        prompt = [1 + (i + at) % 5 for at in range(12 + 4 * i)]
        yield from (Open(i), Append(i, prompt), generate(i, i, 24, ignore_eos=True), Close(i))
    yield from (Open(10), Append(10, [7, 8, 9]))
    yield Generate(10, 10, sampling_params(max_tokens=12, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True))
    yield Fork(10, [11, 12])
    yield Generate(11, 11, sampling_params(max_tokens=20, temperature=0.7, seed=1), constraint=PATTERN)
    yield Generate(12, 12, sampling_params(max_tokens=20, temperature=0.0), constraint=WORDS)
    yield generate(10, 13, 6, logprobs=True, top_logprobs=3, ignore_eos=True)
    yield from (Close(session) for session in (10, 11, 12))


def cut_at_random(runner):
    """Divides all steps of rank 0's runner into up to four micro-batches; returns their numbers, a list that grows.

    Checks that no micro-batch reads a page that a later one writes.
    """
    chance, numbers = np.random.default_rng(5), []

    def ends(arrays):
        total = len(arrays.token_ids)
        ends = sorted({*chance.integers(1, total + 1, chance.integers(0, 4)).tolist(), total})
        written = set(arrays.write_slots.tolist())
        for part, _ in split_step(arrays, (), ends):
            written -= set(part.write_slots.tolist())
            assert written.isdisjoint(part.kv_pages.tolist())
        numbers.append(len(ends))
        return ends

    runner.micro_batch_ends = ends
    return numbers


def assert_same_tokens(ranks, family, folder, expected, stages=1, variant=""):
    """With greedy and sampled calls, constraints, forks, drafts from the prompt, and a pool that is too small.

    Steps of several stages are divided into micro-batches at random.
    """
    alone, (retractions, drafts) = expected(family, variant)
    assert retractions > 0 and drafts > 0
    runner = rank_runner(ranks, folder(family, variant), stages, max_pages=PAGES)
    numbers = cut_at_random(runner) if stages > 1 else [4]
    together, _ = run_calls(runner)
    assert max(numbers) > 2
    assert {call: outcome.tokens for call, outcome in together.items()} == {
        call: outcome.tokens for call, outcome in alone.items()
    }
    for token, ours in zip(alone[13].logprobs, together[13].logprobs, strict=True):
        assert ours.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in token.top]


def assert_same_logits(ranks, family, variant, folder, stages=1):
    tokens = text(24, seed=3, vocab_size=VOCAB)
    alone = all_logits(single_runner(folder(family, variant), max_pages=90), tokens)
    together = all_logits(rank_runner(ranks, folder(family, variant), stages, max_pages=90), tokens)
    assert torch.allclose(alone, together, atol=1e-4), (alone - together).abs().max()
