"""Text out of tokens as they come: any split gives the text of the whole, and never half a character."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained.vocabulary import Vocabulary
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
def test_any_split_is_the_whole_text(tokens: list[bytes], data: st.DataObject) -> None:
    text = Detokenizer(vocabulary(tokens))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    bounds = [0, *cuts, len(tokens)]
    pushed = [text.push(list(range(a, b))) for a, b in pairwise(bounds)]
    whole = codecs.getincrementaldecoder("utf-8")("replace")
    assert "".join(pushed) == whole.decode(b"".join(tokens))


@given(st.text())
def test_sound_text_never_shows_a_replacement_early(value: str) -> None:
    raw = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    text = Detokenizer(vocabulary([raw[i : i + 1] for i in range(len(raw))]))
    so_far = ""
    for i in range(len(raw)):
        so_far += text.push([i])
        assert raw.decode().startswith(so_far)
    assert so_far == raw.decode()


def test_invalid_bytes_show_when_they_are_certain() -> None:
    text = Detokenizer(vocabulary([EURO[:2], b"a", b"\xff"]))
    assert [text.push([i]) for i in (0, 1, 2, 0)] == ["", "\ufffda", "\ufffd", ""]


@pytest.mark.parametrize("i", [-1, 3])
def test_ids_beyond_the_vocabulary(i: int) -> None:
    with pytest.raises(InputError):
        Detokenizer(vocabulary([b"a", b"b", b"c"])).push([i])


def test_with_the_embedded_models_tokens() -> None:
    tokenizer = load_tokenizer(locate_model())
    ids = tokenizer.encode_plain("naïve 漢字 🙂!")
    text = Detokenizer(tokenizer.vocabulary)
    pushed = [text.push([i]) for i in ids]
    assert len([p for p in pushed if not p]) >= 1
    assert "".join(pushed) == "naïve 漢字 🙂!"
