"""Pre-tokenizers of GGUF files, compared with `tokenizers` on what the models' own tokenizer.json say."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_metadata import gguf_metadata, trained_metadata
from tokenizer_samples import SAMPLES, TEXT
from tokenizers import Tokenizer as PublishedTokenizer

from plait.runtime.errors import UnsupportedModel
from plait.runtime.tokenizer.detokenizer import Detokenizer
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.token_healing import heal_choices
from plait.runtime.tokenizer.tokenizer import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
CASED = "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: E501
DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = WORDS | {"use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


CJK = split("[一-龥ࠀ-一가-퟿]+")
DEEPSEEK_LLM = [split(f"\\s?[{CASED}]+"), split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"), split("\\s+$"), CJK]
PUBLISHED = {  # name: (normalizer, pre-tokenizers, ignore_merges)
    "gpt-2": (None, [WORDS], False),
    "mpt": ("NFC", [WORDS], False),
    "smollm": (None, [DIGITS, WORDS], False),
    "starcoder": (None, [DIGITS, WORDS], False),
    "refact": (None, [DIGITS, WORDS], False),
    "command-r": ("NFC", [DIGITS, WORDS], False),
    "llama-bpe": (None, [split(LLAMA3), BYTES], True),
    "smaug-bpe": (None, [split(LLAMA3), BYTES], True),
    "dbrx": (None, [split(LLAMA3), BYTES], False),
    "qwen2": ("NFC", [split(QWEN2), BYTES], False),
    "deepseek-r1-qwen": ("NFC", [split(QWEN2), BYTES], False),
    "gpt-4o": (None, [split(GPT4O), BYTES], False),
    "tekken": (None, [split(TEKKEN), BYTES], True),
    "deepseek-llm": (None, [split("[\r\n]"), *DEEPSEEK_LLM, DIGITS, BYTES], False),
    "deepseek-coder": (
        None,
        [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), CJK, DIGITS, BYTES],
        False,
    ),
    # llama.cpp's, for files without a name.
    "default": (
        None,
        [split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), BYTES],
        False,
    ),
}
LETTERS = "aAbBßſ '’sStTdD09٣½²Ⅷ \n\r\t\u3000\u00a0.,!?/$+`=_ЖжΩωἈἀგᲒहिकी้ไทยعرب漢かカ한e\u0301Dždžʰªºﬁ𐐀𐐨𝐀🙂👩‍💻"
SCRIPTS = st.lists(st.sampled_from([*LETTERS, "e\u0301", "A\u0308", "'s", "'LL", " +", "`="]), max_size=40).map("".join)
ANY_TEXT = st.one_of(TEXT, SCRIPTS, st.sampled_from(SAMPLES))


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(definition_from_gguf(trained_metadata(name)))


@cache
def published(name: str) -> PublishedTokenizer:
    metadata = trained_metadata(name)
    normalizer, steps, ignore_merges = PUBLISHED[name]
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens) if types[i] == 1},
        "merges": metadata["tokenizer.ggml.merges"],
        "ignore_merges": ignore_merges,
    }
    parts = {
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }
    return PublishedTokenizer.from_str(json.dumps({"version": "1.0", "model": model, **parts}))


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_ids_equal_tokenizers_on_the_published_pattern(name: str, text: str) -> None:
    assert tokenizer_of(name).encode_plain(text) == published(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", {json.dumps(steps): name for name, (_, steps, _) in PUBLISHED.items()}.values())
def test_words_equal_on_every_character_of_the_scripts_that_patterns_name(name: str) -> None:
    blocks = [
        (0x20, 0x3100),
        (0x9F00, 0xAC00),
        (0xD780, 0xD800),
        (0xFB00, 0x10000),
        (0x10400, 0x11900),
        (0x1E900, 0x1E950),
    ]
    text = "".join(f"{before}{chr(code)}x" for start, end in blocks for code in range(start, end) for before in " 1")
    ours = definition_from_gguf(trained_metadata(name)).backends.pair()[0].pre_tokenizer
    words, expected = (
        [word for word, _ in splitter.pre_tokenize_str(text)] for splitter in (ours, published(name).pre_tokenizer)
    )
    assert words == expected


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=50, deadline=None)
@given(text=ANY_TEXT, choices=st.lists(SCRIPTS.filter(bool), min_size=1, max_size=3))
def test_text_survives_detokenizing_and_token_healing(name: str, text: str, choices: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode_plain(text)
    normalized = text if PUBLISHED[name][0] is None else published(name).normalizer.normalize_str(text)
    assert tokenizer.decode(ids) == normalized
    detokenizer = Detokenizer(tokenizer.vocabulary)
    assert "".join(detokenizer.push([i]) for i in ids) == normalized
    if PUBLISHED[name][0] is not None:
        return  # a border between text and choice may split a letter that NFC composes
    parts = [("<|im_start|>", True), (text, False)]
    all_ids, num_replaced, replacements = heal_choices(tokenizer, parts, choices)
    kept = all_ids[: len(all_ids) - num_replaced]
    assert [tokenizer.decode([*kept, *healed]) for healed in replacements] == [text + choice for choice in choices]


@pytest.mark.parametrize(
    ("name", "add_bos", "word"),
    [("tekken", True, True), ("llama-bpe", True, True), ("smaug-bpe", False, True), ("dbrx", False, False)],
)
def test_bos_and_words_that_no_merges_form_depend_on_the_name(name: str, add_bos: bool, word: bool) -> None:
    metadata = trained_metadata(name)
    key = "tokenizer.ggml."
    metadata[key + "tokens"] = [*metadata[key + "tokens"], "qzqz"]
    metadata[key + "token_type"] = np.append(metadata[key + "token_type"], 1).astype(np.int32)
    tokenizer = Tokenizer(definition_from_gguf(metadata))
    assert (tokenizer.encode_plain("qzqz") == [len(metadata[key + "tokens"]) - 1]) is word
    assert tokenizer.add_bos is add_bos
    assert Tokenizer(definition_from_gguf(metadata | {key + "add_bos_token": not add_bos})).add_bos is not add_bos


def test_an_unknown_pre_tokenizer_is_refused_with_its_name_and_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'kimi-k2'.*dbrx, .*gpt-4o, .*safetensors folder"):
        definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.pre": "kimi-k2"})


def test_a_missing_name_is_llama_cpps_default() -> None:
    metadata = trained_metadata("default")
    del metadata["tokenizer.ggml.pre"]
    text = "a+b 12345`x"
    assert Tokenizer(definition_from_gguf(metadata)).encode_plain(text) == tokenizer_of("default").encode_plain(text)


def test_user_defined_tokens_of_white_space_or_one_letter_are_matched_in_any_text() -> None:
    metadata = trained_metadata("mpt")
    key = "tokenizer.ggml."
    spaces = len(metadata[key + "tokens"])
    metadata[key + "tokens"] = [*metadata[key + "tokens"], "   ", "ü", "<tool>"]
    metadata[key + "token_type"] = np.append(metadata[key + "token_type"], [4, 4, 4]).astype(np.int32)
    tokenizer = Tokenizer(definition_from_gguf(metadata))
    ids = tokenizer.encode_plain("a   büc<tool>")
    a, b, rest = map(tokenizer.encode_plain, ["a", "b", "c<tool>"])
    assert ids == [*a, spaces, *b, spaces + 1, *rest]
    assert spaces + 2 not in ids and tokenizer.decode(ids) == "a   büc<tool>"


def test_a_long_run_of_spaces_before_a_mark_takes_no_quadratic_time() -> None:
    """DeepSeek's own pattern for spaces at the end begins a search at each space: 27 s for this text."""
    text = " " * 60_000 + "\u0301"
    tokenizer = tokenizer_of("deepseek-llm")
    start = time.process_time()
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    assert time.process_time() - start < 5  # 0.05 s on an idle machine


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|end|>", "<|im_end|>", "<end_of_turn>"])
def test_a_turn_ends_at_its_control_token_if_the_file_names_only_the_end_of_a_text(end: str) -> None:
    metadata = trained_metadata("gpt-4o")
    key = "tokenizer.ggml."
    metadata[key + "tokens"] = [*(token for token in metadata[key + "tokens"] if token != "<|im_end|>"), end]
    turn_end, text_end = len(metadata[key + "tokens"]) - 1, metadata[key + "eos_token_id"]
    assert definition_from_gguf(metadata).eos_ids == (text_end, turn_end)
    assert definition_from_gguf(metadata | {key + "eot_token_id": 7}).eos_ids == (text_end, 7)
    metadata[key + "token_type"][-1] = 4  # user-defined, as in files of Phi-3
    assert definition_from_gguf(metadata).eos_ids == (text_end, turn_end)
    metadata[key + "token_type"][-1] = 1  # text
    assert definition_from_gguf(metadata).eos_ids == (text_end,)
