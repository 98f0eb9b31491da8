"""Tokenizers from Hugging Face folders compared with the `tokenizers` library, and invalid folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_samples import PLAIN_TEXT_TOKENS, SAMPLES
from tokenizers import AddedToken, decoders, models, normalizers
from trained_tokenizers import ADDED, save_folder, train_tokenizer

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["byte-level", "prepend", "first", "always", "never"])
def tokenizer_and_reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    reference = train_tokenizer(request.param)
    return load_tokenizer(save_folder(reference, tmp_path_factory.mktemp(request.param))), reference


TEMPLATE_TEXT = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<end>", "<mask>", "<tool>", "<tool>2", " ", "\n", "the cat", "é", "12", "<to", "x  y"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEMPLATE_TEXT)
def test_control_text_ids_equal_tokenizers(tokenizer_and_reference: Any, text: str) -> None:
    tokenizer, reference = tokenizer_and_reference
    assert tokenizer.encode([(text, True)], at_start=True) == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEMPLATE_TEXT)
def test_user_text_has_no_added_tokens_and_decodes_to_itself(tokenizer_and_reference: Any, text: str) -> None:
    tokenizer, reference = tokenizer_and_reference
    ids = tokenizer.encode_plain(text)
    added = {reference.token_to_id(token.content) for token in ADDED}
    assert not added & set(ids)
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(["a", "ab", " ", "\n", "é", *PLAIN_TEXT_TOKENS, "<think>", "<turn>"]), max_size=10)
)
def test_white_space_and_html_tags_are_matched_as_in_tokenizers(tmp_path: Path, pieces: list[str]) -> None:
    """Gemma's tokenizer.json: SentencePiece without a prefix, its user-defined symbols among the added tokens."""
    if not (tmp_path / "tokenizer.json").exists():
        normal = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{b:02X}>" for b in range(256)),
            *"▁ab",
            "ab",
            *PLAIN_TEXT_TOKENS,
            "<think>",
        ]
        vocab = {text: i for i, text in enumerate(normal)}
        model = models.BPE(vocab, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        reference = tokenizers.Tokenizer(model)
        reference.normalizer = normalizers.Replace(" ", "▁")
        reference.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        reference.add_tokens([AddedToken(text, normalized=False) for text in [*PLAIN_TEXT_TOKENS, "<think>"]])
        save_folder(reference, tmp_path)
    reference, tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    text = "".join(pieces)
    cut = [(piece, "<think>" in piece) for piece in re.split("(<think>)", text)]
    assert tokenizer.encode(cut) == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    assert reference.token_to_id("<think>") not in tokenizer.encode_plain(text)


def test_special_tokens_of_a_folder(tokenizer_and_reference: Any) -> None:
    tokenizer, reference = tokenizer_and_reference
    assert tokenizer.bos_id == reference.token_to_id("<s>")
    assert tokenizer.add_bos
    assert tokenizer.eos_ids == (reference.token_to_id("</s>"),)
    silent = {t: tokenizer.vocabulary.token_bytes[reference.token_to_id(t)] for t in ("<s>", "<end>", "<tool>", "t")}
    assert silent == {"<s>": b"", "<end>": b"", "<tool>": b"<tool>", "t": b"t"}


def test_a_folder_saved_by_transformers_equals_the_gguf_tokenizer(
    smollm2: Tokenizer, transformers_smollm2: Any, tmp_path: Path
) -> None:
    transformers_smollm2.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 49155, "eos_token_id": [2, 0]}')
    reloaded = load_tokenizer(tmp_path)
    assert reloaded.eos_ids == (2, 0)
    assert reloaded.vocab_size == 49155
    assert reloaded.vocabulary.token_bytes == smollm2.vocabulary.token_bytes + (b"",) * 3
    assert reloaded.control_ids == smollm2.control_ids
    assert reloaded.chat_template is not None
    assert smollm2.chat_template is not None
    assert reloaded.chat_template.source == smollm2.chat_template.source
    for text in SAMPLES:
        assert reloaded.encode_plain(text) == smollm2.encode_plain(text)


def test_config_files_override_tokenizer_json(tmp_path: Path) -> None:
    reference = train_tokenizer("byte-level")
    folder = save_folder(reference, tmp_path / "m", add_bos_token=False, chat_template="from the config")
    vocab_size = reference.get_vocab_size()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    tokenizer = load_tokenizer(folder, vocab_size=vocab_size - 1)
    assert tokenizer.eos_ids == (1, 5)
    assert not tokenizer.add_bos
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == "from the config"
    assert tokenizer.chat_template.eos_token == "</s>"
    # The last added token has no logit, so it is omitted.
    assert max(tokenizer.encode([("<tool>2", True)])) < vocab_size - 1
    (folder / "chat_template.jinja").write_text("from the file")
    reloaded = load_tokenizer(folder)
    assert reloaded.chat_template is not None
    assert reloaded.chat_template.source == "from the file"
    assert load_tokenizer(save_folder(reference, tmp_path / "none")).chat_template is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda j: j["model"].update(type="Unigram"), UnsupportedModel, "Unigram"),
        (lambda j: j.pop("decoder"), UnsupportedModel, "decoder"),
        (lambda j: j.pop("model"), CorruptModel, "is inconsistent"),
        (lambda j: j["model"]["merges"].append(["no", "such"]), CorruptModel, "is inconsistent"),
        (lambda j: j["model"]["vocab"].update(far=10**9), CorruptModel, "rows"),
        (lambda j: j["added_tokens"].append({"id": "x"}), CorruptModel, "is inconsistent"),
    ],
)
def test_invalid_folders_raise_a_model_error(
    tmp_path: Path, change: Callable[[Any], Any], error: type[ModelError], message: str
) -> None:
    folder = save_folder(train_tokenizer("byte-level"), tmp_path)
    source = json.loads((folder / "tokenizer.json").read_text())
    change(source)
    (folder / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(error, match=message):
        load_tokenizer(folder)


@pytest.fixture(scope="module")
def valid_tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = save_folder(train_tokenizer("prepend"), tmp_path_factory.mktemp("sound"))
    return (folder / "tokenizer.json").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_raise_only_model_errors(
    valid_tokenizer_json: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(valid_tokenizer_json)
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
        assert str(error)  # noqa: PT017 (a damaged file may still be valid)
