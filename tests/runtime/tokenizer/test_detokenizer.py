"""The detokenizer: the text has complete characters only and does not depend on how the tokens are divided."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.detokenizer import Detokenizer
from plait.runtime.tokenizer.tokenizer import load_tokenizer

EURO = "€".encode()
CHUNKS = st.lists(
    st.one_of(st.binary(max_size=4), st.text(max_size=2).map(str.encode), st.sampled_from([EURO[:1], EURO[1:2]])),
    max_size=12,
)


def vocabulary(tokens: list[bytes]) -> Vocabulary:
    return Vocabulary(tuple(tokens), eos_ids=(), encode=lambda text: [])


@given(tokens=CHUNKS, data=st.data())
def test_every_division_of_the_tokens_gives_the_same_text(tokens: list[bytes], data: st.DataObject) -> None:
    detokenizer = Detokenizer(vocabulary(tokens))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    bounds = [0, *cuts, len(tokens)]
    pieces = [detokenizer.push(list(range(a, b))) for a, b in pairwise(bounds)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert "".join(pieces) == decoder.decode(b"".join(tokens))


@given(st.text())
def test_valid_text_never_contains_a_premature_replacement_character(value: str) -> None:
    raw = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    detokenizer = Detokenizer(vocabulary([raw[i : i + 1] for i in range(len(raw))]))
    text = ""
    for i in range(len(raw)):
        text += detokenizer.push([i])
        assert raw.decode().startswith(text)
    assert text == raw.decode()


def test_invalid_bytes_are_replaced_as_soon_as_they_are_certain() -> None:
    detokenizer = Detokenizer(vocabulary([EURO[:2], b"a", b"\xff"]))
    assert [detokenizer.push([i]) for i in (0, 1, 2, 0)] == ["", "\ufffda", "\ufffd", ""]


@pytest.mark.parametrize("i", [-1, 3])
def test_ids_outside_the_vocabulary_raise_input_error(i: int) -> None:
    with pytest.raises(InputError):
        Detokenizer(vocabulary([b"a", b"b", b"c"])).push([i])


def test_tokens_of_the_embedded_model() -> None:
    tokenizer = load_tokenizer(locate_model())
    ids = tokenizer.encode_plain("naïve 漢字 🙂!")
    detokenizer = Detokenizer(tokenizer.vocabulary)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "" in pieces
    assert "".join(pieces) == "naïve 漢字 🙂!"
