"""Gemma 3 270M, loaded by name: tokens and logits equal the references.

The references are transformers with the weights dequantized by the gguf package, and a direct implementation of
SentencePiece over the tokens and scores of the file.
"""

from __future__ import annotations

import itertools

import gguf
import pytest
import torch
from fast_gguf_reader import Reader
from tiny_hf_models import run, transformers_greedy, transformers_logits
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import plait
from plait.cli import main
from plait.runtime.errors import InputError
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params

NAME = "gemma3-270m"
TEXTS = [
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<table>\n<tr><td>1</td> <td>two</td>\n\n\n\t\t🤦🏽‍♂️ naïve 漢字かな ٣٤٥",
]
UNUSUAL_TEXTS = [
    "Hello world",
    "  two  spaces\n\n\n tabs\t\t x ",
    " ",
    "\n",
    "12345 ٣٤٥ ½ Ⅷ ² 1,234.5",
    "naïve café 漢字かな 🤦🏽‍♂️ 🇫🇷 \u200b\u00a0e\u0301",
    "def f(x):\n    return x**2  # ok\r\n",
    "can't won't I'LL we've",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    " " * 100 + "\n" * 40 + "\t" * 3,
    "<table><b>bold</b></table> <start_of_turn>user <bos><eos> <unused5> [multimodal] <0x41>",
    "Überfahrtsgesellschaft antidisestablishmentarianism",
    "The quick brown fox jumps over the lazy dog; " * 3,
    "\x00\x01\x7f￾𐍈",
]


@pytest.fixture(scope="module")
def path():
    return locate_model(NAME)


@pytest.fixture(scope="module")
def metadata(path):
    return open_gguf(path, metadata_only=True).metadata


def sentencepiece(metadata):
    """Returns an encoder: matches user-defined tokens first, longest from the left, then merges by score."""
    key = "tokenizer.ggml."
    types, scores = metadata[key + "token_type"].tolist(), metadata[key + "scores"].tolist()
    tokens = metadata[key + "tokens"]
    ids = {t: i for i, t in enumerate(tokens) if types[i] == 1}
    byte = {int(t[3:5], 16): i for i, t in enumerate(tokens) if types[i] == 6}
    # The two image tokens and [multimodal] act as control tokens and are not matched in text.
    user_defined = {t: i for i, t in enumerate(tokens) if types[i] == 4 and "_of_image" not in t and "[" not in t}

    def merged(text):
        symbols = list(text.replace(" ", "▁"))
        while True:
            pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
            if not pairs:
                return [i for s in symbols for i in ([ids[s]] if s in ids else [byte[b] for b in s.encode()])]
            left = min(pairs)[1]
            symbols[left : left + 2] = [symbols[left] + symbols[left + 1]]

    def encode(text):
        out, plain = [], ""
        while text:
            token = next((text[:n] for n in range(min(40, len(text)), 0, -1) if text[:n] in user_defined), "")
            if token:
                out += [*merged(plain), user_defined[token]]
                plain, text = "", text[len(token) :]
            else:
                plain, text = plain + text[0], text[1:]
        return out + merged(plain)

    return encode


def test_token_ids_equal_sentencepiece(tokenizer, metadata):
    encode_reference = sentencepiece(metadata)
    for text in UNUSUAL_TEXTS + TEXTS:
        ids = tokenizer.encode_plain(text)
        assert ids == encode_reference(text), text
        assert tokenizer.decode(ids) == text
        assert not tokenizer.control_ids & set(ids)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (2, True, (1, 106))  # 106 ends a turn
    assert tokenizer.vocab_size == 262_144


def transformers_model(path):
    """Loads the same GGUF into transformers, read and dequantized by the gguf package."""
    reader = Reader(path)
    field = lambda key: reader.fields[f"gemma3.{key}"].contents()  # noqa: E731
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].data)
    config = Gemma3TextConfig(
        vocab_size=vocab_size, hidden_size=field("embedding_length"), num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"), num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"), head_dim=field("attention.key_length"),
        query_pre_attn_scalar=field("attention.key_length"), sliding_window=field("attention.sliding_window"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"), max_position_embeddings=field("context_length"),
    )  # fmt: skip
    assert config.rope_parameters["full_attention"]["rope_theta"] == field("rope.freq_base")
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
             "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config).eval()
    state = {}
    for tensor in reader.tensors:
        array, part = gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")
        # The file stores norm weights as 1 + weight.
        value = torch.from_numpy(array - 1 if "norm" in tensor.name else array)
        if part[0] == "blk":
            state[f"model.layers.{part[1]}.{names[part[2]]}.weight"] = value
        else:
            state["model.embed_tokens.weight" if part[0] == "token_embd" else "model.norm.weight"] = value
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unknown) == (["lm_head.weight"], [])
    model.tie_weights()
    for name, module in model.named_modules():  # buffers are not in the file
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        if name.endswith("rotary_emb"):
            module.__init__(config)
    return model


@pytest.fixture(scope="module")
def reference_model(path):
    return transformers_model(path)


@pytest.fixture(scope="module")
def engine():
    with Engine(NAME, device="cpu", dtype="float32", check_integrity=True, max_pages=2000) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(engine):
    return engine.client.tokenizer


@pytest.fixture
def runner(engine):
    """The engine's model runner. It writes to the pages of the engine, so the cache is flushed afterwards."""
    yield engine.engine_loop.model_runner
    engine.client.flush_cache()


def test_logits_equal_transformers(reference_model, runner, tokenizer):
    for text in TEXTS:
        ids = [tokenizer.bos_id, *tokenizer.encode_plain(text)]
        (logits,) = run(runner, [(ids, range(len(ids)), 0, len(ids), 0)])
        expected = transformers_logits(reference_model, ids)
        assert expected.std() > 1
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


def test_logits_beyond_the_sliding_window(reference_model, runner, tokenizer):
    """700 tokens in chunks; 15 of the 18 layers have a window of 512 positions.

    Sums of float32 over so many positions differ by up to 0.004, depending on the number of threads.
    """
    ids = [2, *tokenizer.encode_plain("A long list of words: " + "apple, pear, plum; " * 150)][:700]
    expected = transformers_logits(reference_model, ids, 40)
    run(runner, [(ids, range(700), 0, 256, 255)])
    run(runner, [(ids, range(700), 256, 404, 659)])
    (logits,) = run(runner, [(ids, range(700), 660, 40, 660)])
    torch.testing.assert_close(logits, expected, atol=6e-3, rtol=1e-3)


def test_greedy_tokens_through_the_engine_equal_transformers(reference_model, engine, tokenizer):
    prompts, calls = ["The capital of Italy is", "def fibonacci(n):\n", "1, 2, 3, 4,"], []
    for prompt in prompts:
        session = engine.client.open_session()
        session.append(prompt)
        calls.append(session.generate(sampling_params(max_tokens=12, temperature=0.0, ignore_eos=True)))
    for prompt, call in zip(prompts, calls, strict=True):
        ids, token_ids = [2, *tokenizer.encode_plain(prompt)], call.result().token_ids
        assert len(token_ids) == 12
        assert token_ids == transformers_greedy(reference_model, ids, token_ids), prompt


def test_a_pattern_over_a_vocabulary_of_262144_tokens(engine):
    @plait.function
    def year(s):
        s += "The Second World War ended in the year " + plait.gen("year", regex="[12][0-9]{3}", temperature=0)

    assert year.run(backend=engine)["year"] == "1945"


def test_a_model_without_chat_template_rejects_turns(engine):
    @plait.function
    def chat(s):
        s += plait.user("Hello")
        s += plait.assistant(plait.gen("answer", max_tokens=4))

    with pytest.raises(plait.ProgramError, match="no chat template") as raised:
        chat.run(backend=engine)
    assert isinstance(raised.value.__cause__, InputError)


def test_check_reports_the_family(capsys):
    assert main(["check", "--model", NAME]) == 0
    out = capsys.readouterr().out
    assert "gemma3, 268 million parameters" in out
    assert "18 of 640 wide, 4 heads, 1 KV heads" in out
