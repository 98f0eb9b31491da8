"""The embedded model in the complete runtime: tokens equal transformers and do not depend on scheduling."""

from __future__ import annotations

import random

import gguf
import pytest
import torch
from example_share import sample_of
from fast_gguf_reader import Reader
from tiny_hf_models import transformers_greedy
from transformers import LlamaConfig, LlamaForCausalLM

from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The three primary colors",
    "In 1969, humans", "A list of fruits: apple,", "2 + 2 =", "To make tea, first", "The opposite of hot is",
    "Dear Sir or Madam,", "import numpy as np\n", "The largest planet", "Roses are red,", "My favourite book is",
    "Question: Who wrote Hamlet?\nAnswer:", "Der Himmel ist", "¿Cómo estás?", "🙂 means", "{\"name\": \"",
]  # fmt: skip
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def float32():
    """A deterministic float32 engine in this process, on the torch backend."""
    with Engine(dtype="float32", deterministic=True, check_integrity=True, max_pages=2000) as engine:
        yield engine


def generate_all(engine, prompts, max_tokens=NUM_TOKENS, params_for=None):
    """Returns one result per prompt, greedy unless `params_for(index)` gives the sampling parameters."""
    calls = []
    for i, prompt in enumerate(prompts):
        session = engine.client.open_session()
        session.append(prompt)
        params = sampling_params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        calls.append(session.generate(params_for(i) if params_for else params))
        session.close()
    return [call.result() for call in calls]


def transformers_model(path):
    """Loads the same GGUF into transformers, read and dequantized by the gguf package."""
    reader = Reader(path)
    field = lambda key: reader.fields[f"llama.{key}"].contents()  # noqa: E731
    config = LlamaConfig(
        vocab_size=field("vocab_size"), hidden_size=field("embedding_length"), num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"), num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"), max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
    )  # fmt: skip
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    state = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")
        if part[0] == "blk":
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part[2])
            if heads:  # the file interleaves the rotary pairs of a head, transformers separates the halves
                value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            state[f"model.layers.{part[1]}.{names[part[2]]}.weight"] = value
        else:
            state["model.embed_tokens.weight" if part[0] == "token_embd" else "model.norm.weight"] = value
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unknown) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb.__init__(config)  # its buffers are not in the file
    return model


def test_greedy_tokens_equal_transformers(float32, model_path):
    reference = transformers_model(model_path)
    prompts = sample_of(PROMPTS, least=7)
    for prompt, result in zip(prompts, generate_all(float32, prompts), strict=True):
        ids = float32.client.tokenizer.encode_plain(prompt)
        assert len(result.token_ids) == NUM_TOKENS
        assert result.token_ids == transformers_greedy(reference, ids, result.token_ids), prompt


def test_preemption_in_a_small_pool_does_not_change_tokens():
    long_prompts = [prompt * 3 for prompt in PROMPTS[:8]]
    settings = dict(deterministic=True, check_integrity=True, max_batch_tokens=64)

    def run(pages):
        with Engine(max_pages=pages, **settings) as engine:
            results = generate_all(engine, long_prompts, 60)
            return [r.token_ids for r in results], engine.client.status(), results

    small_pool_tokens, status, results = run(260)
    large_pool_tokens, large_pool_status, _ = run(6000)
    assert status.retractions > 0
    assert large_pool_status.retractions == 0
    assert small_pool_tokens == large_pool_tokens
    assert sum(r.usage.recomputed_tokens for r in results) > 0
    assert status.free_pages + status.cached_pages == status.total_pages


@pytest.mark.parametrize(("name", "count"), [("exact", 24), ("float32", 8)])
def test_seeded_sampling_does_not_depend_on_the_batch(name, count, request):
    def params(i):
        seed = 1234 if i == 0 else random.getrandbits(40)
        return sampling_params(max_tokens=count, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)

    engine = request.getfixturevalue(name)
    single = generate_all(engine, ["Once upon a time"], params_for=params)[0]
    batched = generate_all(engine, ["Once upon a time", *PROMPTS[:15]], params_for=params)[0]
    assert len(single.token_ids) == count
    assert single.token_ids == batched.token_ids


def test_chunked_prefill_and_cache_hits_do_not_change_logprobs():
    """Compares one prefill, prefill in chunks of 17 tokens, and a cached prefix, with the default weights."""
    prompt = " ".join(PROMPTS[:10])
    with Engine(deterministic=True, max_pages=3000) as unchunked, Engine(deterministic=True, max_pages=3000,
                                                                     max_batch_tokens=17) as chunked:  # fmt: skip
        params = lambda i: sampling_params(max_tokens=12, temperature=0.0, logprobs=True)  # noqa: E731
        cold = generate_all(unchunked, [prompt], params_for=params)[0]
        warm = generate_all(unchunked, [prompt], params_for=params)[0]
        chunks = generate_all(chunked, [prompt], params_for=params)[0]
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    assert cold.usage.cached_tokens == 0
    assert cold.token_ids == warm.token_ids == chunks.token_ids
    assert cold.logprobs == warm.logprobs == chunks.logprobs


def test_text_continues_after_a_stop_string_that_spans_tokens(exact):
    session = exact.client.open_session()
    session.append("1, 2, 3, 4, 5, 6,")
    first = session.generate(sampling_params(max_tokens=30, temperature=0.0, stop=[" 9, 1"])).result()
    assert first.matched == " 9, 1"
    assert first.text.endswith(" 8,")
    session.append(" nine")
    after = session.generate(sampling_params(max_tokens=5, temperature=0.0)).result()
    fresh = exact.client.open_session()
    fresh.append("1, 2, 3, 4, 5, 6," + first.text + " nine")
    assert fresh.generate(sampling_params(max_tokens=5, temperature=0.0)).result().text == after.text


def test_streamed_pieces_are_complete_characters_and_join_to_the_text(exact):
    session = exact.client.open_session()
    session.append("Some emoji: 🙂 😀 🎉 日本語 🙂 😀 🎉 日本語 🙂 😀")
    call = session.generate(sampling_params(max_tokens=24, temperature=0.0))
    pieces = list(call.iter_text())
    assert "".join(pieces) == call.result().text
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(ord(c) > 0x2FFF for c in call.result().text), "the text must contain characters that span tokens"


@pytest.mark.parametrize("count", [32])
def test_calls_with_a_common_prefix_compute_it_once(runtime, count):
    runtime.client.flush_cache()
    prefix = "The following is a long list of words. " + "word " * 990
    tokenizer = runtime.client.tokenizer
    shared = len(tokenizer.encode_plain(prefix))
    assert 950 < shared < 1100
    before = runtime.client.status().computed_tokens
    calls, num_own = [], 0
    for i in range(count):
        session = runtime.client.open_session()
        session.append(prefix + f"Question {i}: why?")
        num_own += len(tokenizer.encode_plain(prefix + f"Question {i}: why?")) - shared + 1
        calls.append(session.generate(sampling_params(max_tokens=1)))
    usages = [call.result().usage for call in calls]
    assert sum(u.computed_tokens for u in usages) <= shared + num_own
    assert runtime.client.status().computed_tokens - before <= shared + num_own
    assert sum(u.cached_tokens for u in usages) >= (count - 1) * (shared - 1)


def test_a_thousand_concurrent_sessions(runtime):
    calls = []
    for i in range(1000):
        session = runtime.client.open_session()
        session.append(f"Number {i}:")
        calls.append(session.generate(sampling_params(max_tokens=2, seed=i)))
        session.close()
    assert all(len(call.result(200).token_ids) <= 2 for call in calls)
    status = runtime.client.status()
    assert status.running_calls == status.waiting_calls == 0
    assert status.free_pages + status.cached_pages == status.total_pages
