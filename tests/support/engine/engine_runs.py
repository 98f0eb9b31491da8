"""Runs an EngineLoop over a tiny real model, with messages that arrive at given steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from fake_engine import VOCAB, ListTransport, ReadyCompiler, outcomes, post, vocabulary
from shared_prefix_reference import LEADER_READS
from tiny_hf_models import randomized
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from plait.constrained import Choices, compile_grammar
from plait.runtime.config import engine_config
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.messages import PROTOCOL, Append, Close, EmbeddingInfo, Generate, Open, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop

CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
GEMMA = SHAPE | dict(head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaForCausalLM.config_class(**SHAPE)),
    "Gemma 3": lambda: Gemma3ForCausalLM(Gemma3ForCausalLM.config_class(**GEMMA, pad_token_id=0)),
}
WORDS = Choices(("a cat in the hat", "a car 123", "dogged pursuit of JSON", "do"))
GRAMMARS = {WORDS: compile_grammar(WORDS, vocabulary())}
PAGES = 300


def device_runners(folder):
    """Runners of one tiny Llama, saved in `folder`: plain, one for a device, and a short one for one with few pages."""
    randomized(MODELS["Llama"]()).save_pretrained(folder)

    def make(pages, tokens=24, kernels=None):
        config = engine_config(device="cpu", dtype="float32", max_pages=pages, max_batch_tokens=tokens)
        return TorchRunner(config, folder, kernels=kernels)

    plain = make(PAGES)
    kernels = dataclasses.replace(plain.kernels, fused=LEADER_READS)
    return SimpleNamespace(plain=plain, device=make(PAGES, kernels=kernels), short=make(70, 12, kernels))


def run(runner, arrivals, steps=None, rows=6, pooling="last", **settings):
    """Returns the outcomes by call. `arrivals`: (step before which it arrives, message). `steps`: an async launcher."""
    transport, config = (
        ListTransport(),
        engine_config(max_batch_rows=rows, check_integrity=True, prompt_lookup=False, **settings),
    )
    embeddings = EmbeddingInfo(SHAPE["hidden_size"], pooling, True)
    adapters = {} if runner.adapter_pool is None else dict(runner.adapter_pool.names)
    welcome = Welcome(PROTOCOL, "", VOCAB, 256, 0, embeddings, adapters=adapters)
    engine_loop = EngineLoop(
        config, welcome, runner, Sampler(), vocabulary(), ReadyCompiler(GRAMMARS), transport, steps
    )
    for number in range(2000):
        post(transport, *(message for at, message in arrivals if at == number))
        engine_loop.step(timeout_s=0.0)
        has_arrivals = any(at > number for at, _ in arrivals)
        waits = engine_loop.calls.num_compiling or engine_loop.batch_scheduler.waiting
        if not (engine_loop.has_work or waits or has_arrivals or transport.inbox):
            assert engine_loop.cache.counts()[2] == 0, "an idle engine holds pages"
            return outcomes(transport)
    raise AssertionError("the engine loop did not become idle")


def arrivals_of(count, n=30, **fields):
    """Messages of `count` sessions with one greedy call each; a session arrives every three steps."""
    greedy = sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True, **fields)
    return [
        (3 * i, message)
        for i in range(count)
        for message in (Open(i), Append(i, [1 + i % 3] * (1 + i)), Generate(i, i, greedy), Close(i))
    ]
