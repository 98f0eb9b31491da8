"""Tokenizers of both sources against `tokenizers` and transformers, and text that tries to be control."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from plait.runtime.errors import CorruptModel, InputError, ModelError, UnsupportedModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.token_healing import TextTail, heal_choices
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

DIGITS_THEN_BYTES = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
TEXT = st.text(
    st.one_of(
        st.sampled_from("abcXYZ  \n\t\r.,'’01239é漢🙂²Ⅷ١\u00a0\u200b{}()<|>_"),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=60,
)
SAMPLES = [
    "Hello world",
    "  two  spaces\n\n\n tabs\t\t x ",
    "12345 ٣٤٥ ½ Ⅷ ² 1,234.5",
    "naïve café 漢字かな 🤦🏽‍♂️ 🇫🇷",
    "def f(x):\n    return x**2  # ok\r\n",
    "can't won't I'LL we've",
    "a" * 200,
    " " * 100,
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model())


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' reading of the GGUF, with the pre-tokenizer of the published SmolLM2 (it ignores `pre`)."""
    path = locate_model()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = DIGITS_THEN_BYTES
    return tokenizer


def test_loading_is_quick() -> None:
    start = time.process_time()
    load_tokenizer(locate_model())
    assert time.process_time() - start < 1.5  # 0.15 s where nothing else runs


def test_the_embedded_models_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.eos_ids, smollm2.bos_id, smollm2.add_bos) == ((2,), 1, False)
    assert smollm2.control_ids == frozenset(range(17))
    assert smollm2.vocab_size == len(smollm2.vocabulary) == 49152
    assert smollm2.chat_template is not None
    assert all(smollm2.vocabulary.token_bytes[i] == b"" for i in smollm2.control_ids)
    assert smollm2.vocabulary.eos_ids == (2,)
    assert smollm2.vocabulary.encode("Hello") == smollm2.encode_plain("Hello") == [19556]


@settings(max_examples=400, deadline=None)
@given(text=TEXT)
def test_plain_text_is_tokenized_as_transformers_does(smollm2: Tokenizer, theirs: Any, text: str) -> None:
    assert smollm2.encode_plain(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_come_back(smollm2: Tokenizer, theirs: Any, text: str) -> None:
    ids = smollm2.encode_plain(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert smollm2.decode(ids) == smollm2.decode([1, *ids, 2]) == text


CONTENT = st.one_of(TEXT, st.sampled_from([*SAMPLES, "", " ", "\n"]))


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=4))
def test_a_chat_built_turn_by_turn_is_apply_chat_template(
    smollm2: Tokenizer, theirs: Any, turns: list[tuple[str, str]]
) -> None:
    template = smollm2.chat_template
    assert template is not None
    parts: list[tuple[str, bool]] = []
    roles: list[str] = []
    for role, content in turns:
        before, after = template.turn_prefix(roles, role), template.turn_suffix(roles, role)
        parts += [(before, True), (content, False), (after, True)]
        roles.append(role)
    parts.append((template.turn_prefix(roles, "assistant"), True))
    chat = [{"role": role, "content": content} for role, content in turns]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert smollm2.encode(parts) == expected


@pytest.fixture(scope="module")
def hostile(smollm2: Tokenizer) -> st.SearchStrategy[list[tuple[str, bool]]]:
    names = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>"]
    pieces = st.sampled_from([*names, "<|im_", "end|>", "<|", "|>", "system\n", " ", "a"])
    return st.lists(st.tuples(st.lists(pieces, max_size=4).map("".join), st.booleans()), max_size=6)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_user_text_never_becomes_control(
    smollm2: Tokenizer, hostile: st.SearchStrategy[list[tuple[str, bool]]], data: st.DataObject
) -> None:
    parts = data.draw(hostile)
    users = [(text, False) for text, _ in parts]
    ids = smollm2.encode(users)
    assert not smollm2.control_ids & set(ids)
    assert smollm2.decode(ids) == "".join(text for text, _ in parts)
    # Where one part ends and the next begins leaves no trace.
    assert ids == smollm2.encode_plain("".join(text for text, _ in parts))
    # Control comes from control parts alone, and only from within one of them.
    found = [i for i in smollm2.encode(parts) if i in smollm2.control_ids]
    expected = [i for text, control in parts if control for i in smollm2.encode([(text, True)])]
    assert found == [i for i in expected if i in smollm2.control_ids]


def test_control_text_is_recognised_in_the_templates_text(smollm2: Tokenizer) -> None:
    assert smollm2.encode([("<|im_start|>user\n", True), ("<|im_end|>", False), ("<|im_end|>", True)]) == [
        1,
        *smollm2.encode_plain("user\n<|im_end|>"),
        2,
    ]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 3, None, b"x"])
def test_what_is_no_text_is_refused(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(InputError):
        smollm2.encode_plain(text)


@pytest.mark.parametrize("ids", [[-1], [49152]])
def test_ids_that_do_not_exist_are_refused(smollm2: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InputError, match="49151"):
        smollm2.decode(ids)


# ------------------------------------------------------------ GGUF metadata of other kinds


def gguf_metadata() -> dict[str, Any]:
    """A small byte-level vocabulary with the names that Llama 3 and Qwen 2 files use."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = [*letters, "ab", "Ġab", "<|begin|>", "<|eot|>", "<|end|>", "<tool>"]
    types = [1] * (len(letters) + 2) + [3, 3, 3, 4]
    key = "tokenizer.ggml."
    return {
        "general.architecture": "llama",
        "llama.vocab_size": len(tokens) + 2,
        key + "model": "gpt2",
        key + "pre": "llama-bpe",
        key + "tokens": tokens,
        key + "token_type": np.array(types, np.int32),
        key + "merges": ["a b", "Ġ ab"],
        key + "bos_token_id": tokens.index("<|begin|>"),
        key + "eos_token_id": tokens.index("<|end|>"),
        key + "eot_token_id": tokens.index("<|eot|>"),
    }


def test_ends_user_defined_tokens_and_padding_rows() -> None:
    tokenizer = Tokenizer(definition_from_gguf(gguf_metadata()))
    count = len(gguf_metadata()["tokenizer.ggml.tokens"])
    begin, eot, end, tool = range(count - 4, count)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((end, eot), begin, True)
    assert tokenizer.control_ids == {begin, eot, end}
    assert tokenizer.vocabulary.token_bytes[tool:] == (b"<tool>", b"", b"")
    assert tokenizer.encode([("<tool><|eot|>", True)]) == [tool, eot]
    assert tool not in tokenizer.encode_plain("<tool>")
    assert tokenizer.decode([tool, eot]) == "<tool>"
    assert tokenizer.suffix_ids == ()
    ended = Tokenizer(definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.add_eos_token": True}))
    assert ended.encode_with_special_tokens("<|end|>") == [begin, *tokenizer.encode_plain("<|end|>"), end]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " ", "123", "45", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("qwen2", ["I", "'LL", " ", "1", "2", "3", "4", "5", " café", "\n\n", " ", " x", "!!\n", "  "]),
        ("gpt-2", ["I", "'", "LL", " 12345", " café", "\n\n ", " x", "!!", "\n  "]),
        ("default", ["I", "'", "LL", " 12345", " café", "\n\n ", " x", "!!", "\n  "]),
        ("smollm", ["I", "'", "LL", " ", "1", "2", "3", "4", "5", " café", "\n\n ", " x", "!!", "\n  "]),
    ],
)
def test_how_each_pre_tokenizer_cuts(pre: str, pieces: list[str]) -> None:
    backend = definition_from_gguf(gguf_metadata() | {"tokenizer.ggml.pre": pre}).continuation_backend
    text = "I'LL 12345 café\n\n  x!!\n  "
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in found] == pieces


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "bert"}, UnsupportedModel, "bert"),
        ({"pre": "deepseek-coder"}, UnsupportedModel, "deepseek-coder"),
        ({"tokens": None}, CorruptModel, "tokens"),
        ({"merges": ["ab"]}, CorruptModel, "merge"),
        ({"token_type": np.array([1], np.int32)}, CorruptModel, "token_type"),
        ({"eos_token_id": 10_000}, CorruptModel, "eos_token_id"),
        ({"eos_token_id": None, "eot_token_id": None}, CorruptModel, "ends a text"),
    ],
)
def test_gguf_tokenizers_that_cannot_be(change: dict[str, Any], error: type[ModelError], says: str) -> None:
    metadata = gguf_metadata() | {"tokenizer.ggml." + key: value for key, value in change.items()}
    with pytest.raises(error, match=says):
        definition_from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_a_width_below_the_tokens_is_refused() -> None:
    with pytest.raises(CorruptModel, match="rows"):
        definition_from_gguf(gguf_metadata(), vocab_size=3)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcd<>s/unk", "ab", "cd"]
SPM_TOKENS += ["▁a", "▁ab", "abcd", "bc", "▁▁", "▁▁▁▁", "dd", "<s", "[X]"]


def spm_metadata() -> dict[str, Any]:
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_TOKENS) - 260) + [4]
    scores = [0.0] * 259 + [-float(i % 7) - i / 100 for i in range(len(SPM_TOKENS) - 259)]
    key = "tokenizer.ggml."
    return {
        key + "model": "llama",
        key + "tokens": SPM_TOKENS,
        key + "token_type": np.array(types, np.int32),
        key + "scores": np.array(scores, np.float32),
    }


def sentencepiece(text: str) -> list[int]:
    """The definition: again and again, join the two neighbours whose joint token scores highest."""
    metadata = spm_metadata()
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(SPM_TOKENS) if types[i] == 1}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for s in symbols for i in ([ids[s]] if s in ids else [3 + b for b in s.encode()])]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abcd  é<s>", max_size=20))
def test_sentencepiece_by_its_definition(text: str) -> None:
    tokenizer = Tokenizer(definition_from_gguf(spm_metadata()))
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((2,), 1, True)
    assert tokenizer.encode_plain(text) == sentencepiece(text)
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    if text:
        assert tokenizer.encode([(text, False)], at_start=True) == sentencepiece(" " + text)
        assert tokenizer.encode([("</s>", True), (text, False)]) == [2, *sentencepiece(" " + text)]


def test_a_control_token_that_is_an_ordinary_word_stays_out_of_reach() -> None:
    metadata = gguf_metadata()
    key = "tokenizer.ggml."
    metadata[key + "tokens"][-1] = "stop"  # llama-bpe takes a whole word from the vocabulary without merging
    metadata[key + "token_type"][-1] = 3
    tokenizer = Tokenizer(definition_from_gguf(metadata))
    assert tokenizer.encode([("stop", True)]) == [len(metadata[key + "tokens"]) - 1]
    assert tokenizer.decode(tokenizer.encode_plain("stop")) == "stop"


def test_sentencepiece_text_that_names_tokens() -> None:
    tokenizer = Tokenizer(definition_from_gguf(spm_metadata()))
    ids = tokenizer.encode_plain("<s></s><unk><0x41>[X]")
    assert not {0, 1, 2, 3 + 0x41, len(SPM_TOKENS) - 1} & set(ids)
    assert tokenizer.encode([("<s>[X]", True)]) == [1, len(SPM_TOKENS) - 1]
    no_prefix = definition_from_gguf(spm_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    assert Tokenizer(no_prefix).encode([("ab", False)], at_start=True) == sentencepiece("ab")


WRITTEN = ["\n", "\n\n", "\n\n\n", "  ", "   ", "\t", "<b>", "</b>", "<table>"]
NOT_WRITTEN = ["<turn>", "[multimodal]", "<think>", "<s>b"]


def gemma_metadata() -> dict[str, Any]:
    """The small SentencePiece vocabulary without a leading space, with what Gemma calls user-defined."""
    metadata = spm_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    key, more = "tokenizer.ggml.", WRITTEN + NOT_WRITTEN
    metadata[key + "tokens"] = [*SPM_TOKENS, *more]
    metadata[key + "token_type"] = np.append(metadata[key + "token_type"], [4] * len(more)).astype(np.int32)
    metadata[key + "scores"] = np.append(metadata[key + "scores"], [-1000] * len(more)).astype(np.float32)
    return metadata


def with_written(text: str) -> list[int]:
    """User-defined symbols first, the longest from the left; what lies between is SentencePiece's."""
    ids: list[int] = []
    between = ""
    while text:
        found = max((t for t in WRITTEN if text.startswith(t)), key=len, default="")
        if found:
            ids += [*sentencepiece(between), len(SPM_TOKENS) + WRITTEN.index(found)]
            between, text = "", text[len(found) :]
        else:
            between, text = between + text[0], text[1:]
    return ids + sentencepiece(between)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "ab", "cd", " ", "\n", "\t", "é", *WRITTEN, *NOT_WRITTEN]), max_size=12)
)
def test_white_space_and_tags_that_a_vocabulary_names_are_found_in_text_and_nothing_else_is(pieces: list[str]) -> None:
    tokenizer, text = Tokenizer(definition_from_gguf(gemma_metadata())), "".join(pieces)
    ids = tokenizer.encode_plain(text)
    assert ids == with_written(text)
    assert tokenizer.decode(ids) == text
    out_of_reach = {len(SPM_TOKENS) + len(WRITTEN) + i for i in range(len(NOT_WRITTEN))}
    assert not out_of_reach & set(ids)
    # Where a part ends leaves no trace, though a template's text and a user's meet in white space.
    assert tokenizer.encode([("\n", True), ("\n" + text, False)]) == with_written("\n\n" + text)
    for control in NOT_WRITTEN[:3]:
        assert set(tokenizer.encode([(control, True)])) <= out_of_reach


def test_white_space_that_ends_a_text_is_no_text() -> None:
    metadata = gemma_metadata()
    newline = len(SPM_TOKENS) + WRITTEN.index("\n")
    tokenizer = Tokenizer(definition_from_gguf(metadata | {"tokenizer.ggml.eos_token_id": newline}))
    assert newline in tokenizer.control_ids
    assert tokenizer.encode_plain("a\nb") == sentencepiece("a\nb")


# ------------------------------------------------------------ tokenizer.json

CORPUS = [*SAMPLES, "the cat sat on the mat and the dog ate the cat food 123 456"] * 3
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("<end>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("<tool>2", special=False, normalized=False),
]


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of each family, its added tokens in and out of the vocabulary."""
    decode_byte_level_token = kind == "byte-level"
    fallback: dict[str, Any] = (
        {} if decode_byte_level_token else {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    )
    tokenizer = tokenizers.Tokenizer(models.BPE(**fallback))
    if decode_byte_level_token:
        tokenizer.pre_tokenizer, tokenizer.decoder = DIGITS_THEN_BYTES, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<s>", "</s>"]
    else:
        if kind == "prepend":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            tokenizer.normalizer = normalizers.Sequence(steps)
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet, special = [], ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if not decode_byte_level_token:
        # The trainer calls its byte tokens special; a model's file does not.
        source = json.loads(tokenizer.to_str())
        source["added_tokens"] = [t for t in source["added_tokens"] if not t["content"].startswith("<0x")]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
    tokenizer.add_special_tokens(ADDED[:4])
    tokenizer.add_tokens(ADDED[4:])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config)
    )
    return folder


@pytest.fixture(scope="module", params=["byte-level", "prepend", "first", "always", "never"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    oracle = trained(request.param)
    return load_tokenizer(saved(oracle, tmp_path_factory.mktemp(request.param))), oracle


TEMPLATE_TEXT = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<end>", "<mask>", "<tool>", "<tool>2", " ", "\n", "the cat", "é", "12", "<to", "x  y"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEMPLATE_TEXT)
def test_a_folders_template_text_is_tokenized_as_tokenizers_does(pair: Any, text: str) -> None:
    ours, oracle = pair
    assert ours.encode([(text, True)], at_start=True) == oracle.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEMPLATE_TEXT)
def test_a_folders_user_text_is_plain_and_comes_back(pair: Any, text: str) -> None:
    ours, oracle = pair
    ids = ours.encode_plain(text)
    added = {oracle.token_to_id(token.content) for token in ADDED}
    assert not added & set(ids)
    assert ours.decode(ids) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(["a", "ab", " ", "\n", "é", *WRITTEN, "<think>", "<turn>"]), max_size=10))
def test_white_space_and_tags_of_a_folder_are_found_as_tokenizers_does(tmp_path: Path, pieces: list[str]) -> None:
    """Gemma's tokenizer.json: SentencePiece without a prefix, its user-defined symbols among the added tokens."""
    if not (tmp_path / "tokenizer.json").exists():
        normal = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁ab", "ab", *WRITTEN, "<think>"]
        vocab = {text: i for i, text in enumerate(normal)}
        model = models.BPE(vocab, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        oracle = tokenizers.Tokenizer(model)
        oracle.normalizer = normalizers.Replace(" ", "▁")
        oracle.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        oracle.add_tokens([AddedToken(text, normalized=False) for text in [*WRITTEN, "<think>"]])
        saved(oracle, tmp_path)
    oracle, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    text = "".join(pieces)
    cut = [(piece, "<think>" in piece) for piece in re.split("(<think>)", text)]
    assert ours.encode(cut) == oracle.encode(text).ids
    assert ours.decode(ours.encode_plain(text)) == text
    assert oracle.token_to_id("<think>") not in ours.encode_plain(text)


def test_a_folders_special_tokens(pair: Any) -> None:
    ours, oracle = pair
    assert ours.bos_id == oracle.token_to_id("<s>")
    assert ours.add_bos
    assert ours.eos_ids == (oracle.token_to_id("</s>"),)
    silent = {t: ours.vocabulary.token_bytes[oracle.token_to_id(t)] for t in ("<s>", "<end>", "<tool>", "t")}
    assert silent == {"<s>": b"", "<end>": b"", "<tool>": b"<tool>", "t": b"t"}


def test_the_embedded_tokenizer_saved_by_transformers_is_the_same(
    smollm2: Tokenizer, theirs: Any, tmp_path: Path
) -> None:
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 49155, "eos_token_id": [2, 0]}')
    again = load_tokenizer(tmp_path)
    assert again.eos_ids == (2, 0)
    assert again.vocab_size == 49155
    assert again.vocabulary.token_bytes == smollm2.vocabulary.token_bytes + (b"",) * 3
    assert again.control_ids == smollm2.control_ids
    assert again.chat_template is not None
    assert smollm2.chat_template is not None
    assert again.chat_template.source == smollm2.chat_template.source
    for text in SAMPLES:
        assert again.encode_plain(text) == smollm2.encode_plain(text)


def test_the_configs_beside_it(tmp_path: Path) -> None:
    oracle = trained("byte-level")
    folder = saved(oracle, tmp_path / "m", add_bos_token=False, chat_template="from the config")
    vocab_size = oracle.get_vocab_size()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    tokenizer = load_tokenizer(folder, vocab_size=vocab_size - 1)
    assert tokenizer.eos_ids == (1, 5)
    assert not tokenizer.add_bos
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == "from the config"
    assert tokenizer.chat_template.eos_token == "</s>"
    # The last added token has no logit, so it does not exist.
    assert max(tokenizer.encode([("<tool>2", True)])) < vocab_size - 1
    (folder / "chat_template.jinja").write_text("from the file")
    again = load_tokenizer(folder)
    assert again.chat_template is not None
    assert again.chat_template.source == "from the file"
    assert load_tokenizer(saved(oracle, tmp_path / "none")).chat_template is None


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda j: j["model"].update(type="Unigram"), UnsupportedModel, "Unigram"),
        (lambda j: j.pop("decoder"), UnsupportedModel, "decoder"),
        (lambda j: j.pop("model"), CorruptModel, "contradicts"),
        (lambda j: j["model"]["merges"].append(["no", "such"]), CorruptModel, "contradicts"),
        (lambda j: j["model"]["vocab"].update(far=10**9), CorruptModel, "rows"),
        (lambda j: j["added_tokens"].append({"id": "x"}), CorruptModel, "contradicts"),
    ],
)
def test_folders_that_cannot_be(
    tmp_path: Path, change: Callable[[Any], Any], error: type[ModelError], says: str
) -> None:
    folder = saved(trained("byte-level"), tmp_path)
    source = json.loads((folder / "tokenizer.json").read_text())
    change(source)
    (folder / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(error, match=says):
        load_tokenizer(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = saved(trained("prepend"), tmp_path_factory.mktemp("sound"))
    return (folder / "tokenizer.json").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_in_a_model_error(sound: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sound)
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=6), st.sampled_from([b"null", b"-1", b"{}"])))
        content[at : at + len(patch)] = patch
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    try:
        load_tokenizer(tmp_path).encode([("<s>the cat é", True)])
    except ModelError as error:
        assert str(error)  # noqa: PT017 (no error at all is fine too: a changed letter may be sound)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_metadata_ends_in_a_model_error(data: st.DataObject) -> None:
    metadata = data.draw(st.sampled_from([gguf_metadata, spm_metadata]))()
    key = data.draw(st.sampled_from(sorted(metadata)))
    metadata[key] = data.draw(
        st.one_of(
            st.none(),
            st.integers(),
            st.text(max_size=3),
            st.lists(st.text(max_size=3), max_size=3),
            st.just(np.arange(3)),
        )
    )
    try:
        Tokenizer(definition_from_gguf(metadata)).encode([("ab", True)])
    except ModelError as error:
        assert str(error)  # noqa: PT017


def test_the_whole_header_is_not_needed(smollm2: Tokenizer) -> None:
    metadata = open_gguf(locate_model(), metadata_only=True).metadata
    assert Tokenizer(definition_from_gguf(metadata, vocab_size=50_000)).vocab_size == 50_000


# -- choices behind a text ------------------------------------------------------------------------

COMMON = st.text(  # what SmolLM2 mostly has tokens for: it has none for some bytes
    st.sampled_from("aabbeehlort  \n\t.,'’01239é漢🙂²\u00a0{}()<|>_"), min_size=1, max_size=40
)


@settings(max_examples=200, deadline=None)
@given(text=COMMON, choices=st.lists(COMMON, min_size=1, max_size=4), is_control=st.booleans())
def test_choices_are_tokenized_as_one_with_the_end_of_the_text(smollm2: Tokenizer, text, choices, is_control) -> None:
    whole = text + "".join(choices)
    assume(smollm2.decode(smollm2.encode_plain(whole)) == whole)  # it has no tokens for some bytes
    parts = [("<|im_start|>", True), (text, is_control)]
    ids = smollm2.encode(parts, at_start=True)
    whole_ids, num_replaced, behind = heal_choices(smollm2, parts, choices)
    assert whole_ids == ids and 0 <= num_replaced < len(ids) and all(behind)
    kept = ids[: len(ids) - num_replaced]
    token_bytes = smollm2.vocabulary.token_bytes
    for choice, each in zip(choices, behind, strict=True):
        assert b"".join(token_bytes[i] for i in [*kept, *each]) == (text + choice).encode()
        if is_control:
            assert kept == ids and each == smollm2.encode_plain(choice)
        elif len(ids) <= 8:  # all of the text is looked at again
            assert [*kept, *each] == smollm2.encode([*parts, (choice, False)], at_start=True)


def test_a_space_between_text_and_choice_may_stand_in_either(smollm2: Tokenizer) -> None:
    ids, num_replaced, behind = heal_choices(smollm2, [("The sky is ", False)], ["red", "9"])
    without = heal_choices(smollm2, [("The sky is", False)], [" red", " 9"])
    assert (ids[: len(ids) - num_replaced], 0, behind) == without
    alone = heal_choices(smollm2, [(" ", False)], ["red"])
    assert alone.num_replaced < len(alone.ids), "something is left for the choice to follow"
    assert heal_choices(smollm2, [], ["red"]) == ([], 0, [smollm2.encode_plain("red")])


@settings(max_examples=200, deadline=None)
@given(text=COMMON, cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
       choices=st.lists(COMMON, min_size=1, max_size=4), is_control=st.booleans())  # fmt: skip
def test_choices_are_joined_with_text_that_was_sent(smollm2: Tokenizer, text, cuts, choices, is_control) -> None:
    """Sent in two pieces or one, and a piece not yet sent behind them: what was sent is taken back in whole tokens."""
    whole = text + "".join(choices)
    assume(smollm2.decode(smollm2.encode_plain(whole)) == whole)
    low, high = sorted(cuts)
    sent, end = [], TextTail()
    for parts in ([("<|im_start|>", True)], [(text[:low], is_control)], [(text[low:high], False)]):
        given = [part for part in parts if part[0]]
        if given:
            ids = smollm2.encode(given, at_start=not sent)
            end = end.extend(given, ids)
            sent += ids
    parts = [(text[high:], False)] if text[high:] else []
    ids, num_replaced, behind = heal_choices(smollm2, parts, choices, num_sent=len(sent), sent=end)
    assert ids == (smollm2.encode(parts, at_start=False) if parts else [])
    assert 0 <= num_replaced < len(sent) + len(ids) and all(behind)
    token_bytes = smollm2.vocabulary.token_bytes
    for choice, each in zip(choices, behind, strict=True):
        left = [*sent, *ids][: len(sent) + len(ids) - num_replaced]
        assert b"".join(token_bytes[i] for i in [*left, *each]) == (text + choice).encode()
    if not is_control:
        if not parts and low in (0, high):  # sent at once: as if it had not been sent
            unsent = heal_choices(smollm2, [("<|im_start|>", True), (text, False)], choices)
            assert unsent == (sent, num_replaced, behind)
    elif not text[low:]:
        assert num_replaced == 0, "a chat template's own text is not taken apart"
