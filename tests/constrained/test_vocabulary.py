"""`Vocabulary.from_tokenizer`: token bytes of byte-level and SentencePiece tokenizers, and their EOS ids."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import plait
from plait.constrained import GrammarError, GrammarLogitsProcessor, JsonSchema, Regex, Vocabulary, compile_grammar
from plait.runtime.model_files.locate import locate_model


def byte_level_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: number for number, character in enumerate(alphabet)} | {"Ġa": 256, "Ã©": 257}
    tokenizer = Tokenizer(models.BPE(ids, [("Ġ", "a"), ("Ã", "©")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def test_bytes_of_byte_level_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_ids=[258], size=300)
    assert len(vocabulary) == 300
    assert set(vocabulary.token_bytes[:256]) == {bytes([byte]) for byte in range(256)}
    assert vocabulary.token_bytes[256:259] == (b" a", "é".encode(), b"")
    assert vocabulary.encode(" aé") == [256, 257]
    assert 258 not in vocabulary.encode("<|end|>")
    assert tokenizer.encode("<|end|>").ids == [258], "the caller's tokenizer is unchanged"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"eos_token_id": [258, 3]}),
        ("config.json", {"eos_token_id": 258}),
        ("tokenizer_config.json", {"eos_token": "<|end|>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|end|>"}}),
    ],
)
def test_eos_ids_are_read_from_the_config_files_of_the_folder(
    tmp_path: Path, name: str, content: dict[str, object]
) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="pass eos_ids"):
        Vocabulary.from_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    assert Vocabulary.from_tokenizer(tmp_path).eos_ids[0] == 258
    assert Vocabulary.from_tokenizer(str(tmp_path / "tokenizer.json"), eos_ids=(7,)).eos_ids == (7,)


def test_other_files_raise_value_error(tmp_path: Path) -> None:
    for name, content, message in [
        ("tokenizer.json", b"{", "is not a tokenizer.json"),
        ("tokenizer.json", b"\xff", "is not a tokenizer.json"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Vocabulary.from_tokenizer(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Vocabulary.from_tokenizer(tmp_path / "missing.json")


def test_a_gguf_file_gives_what_the_runtime_uses(tmp_path: Path) -> None:
    vocabulary, expected = Vocabulary.from_tokenizer(locate_model()), plait.load_vocabulary()
    assert vocabulary.fingerprint == expected.fingerprint and vocabulary.encode("a dog") == expected.encode("a dog")
    assert Vocabulary.from_tokenizer(str(locate_model()), eos_ids=(5,)).eos_ids == (5,)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(plait.CorruptModel):
        Vocabulary.from_tokenizer(tmp_path / "model.gguf")
    with pytest.raises(plait.ModelNotFound):
        Vocabulary.from_tokenizer(tmp_path / "missing.gguf")


def test_a_folder_with_one_gguf_file_and_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json, and 0 .gguf files"):
        Vocabulary.from_tokenizer(tmp_path)
    (tmp_path / "model.gguf").symlink_to(locate_model())
    expected = plait.load_vocabulary()
    assert Vocabulary.from_tokenizer(tmp_path).token_bytes == expected.token_bytes
    fast = SimpleNamespace(backend_tokenizer=byte_level_tokenizer(), eos_token_id=258)
    assert Vocabulary.from_tokenizer(fast).eos_ids == (258,)
    assert Vocabulary.from_tokenizer(fast, [3]).eos_ids == (3,)


def test_arguments_of_another_type_are_named() -> None:
    for wrong in (None, 5, b"x"):
        with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
            Vocabulary.from_tokenizer(wrong)  # type: ignore[arg-type]
    vocabulary = plait.load_vocabulary()
    for spec in ("[0-9]+", None, {"type": "integer"}):
        with pytest.raises(TypeError, match=f"not {type(spec).__name__}"):
            compile_grammar(spec, vocabulary)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not str"):
        compile_grammar(Regex("a"), "model.gguf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compile_grammar first; this is Regex"):
        GrammarLogitsProcessor(Regex("a"), vocabulary)  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="a dict, a bool, its JSON text or a Pydantic model, not list"):
        JsonSchema([1])  # type: ignore[arg-type]


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = Tokenizer(
        models.BPE({"<unk>": 0, "<0x0A>": 1, "▁a": 2, "▁": 3, "a": 4}, [("▁", "a")], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>"])
    assert Vocabulary.from_tokenizer(tokenizer, (0,)).token_bytes == (b"", b"\n", b" a", b" ", b"a")


def test_other_tokenizers_and_invalid_ids_raise_value_error() -> None:
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece"):
        Vocabulary.from_tokenizer(Tokenizer(models.WordLevel({"a": 0}, "a")), (0,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Vocabulary((b"a",), (1,), lambda text: [])
    with pytest.raises(ValueError, match="more than the given size"):
        Vocabulary.from_tokenizer(byte_level_tokenizer(), (0,), size=10)
