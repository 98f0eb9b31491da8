"""The embedded model's tokenizer compared with transformers, and user text that imitates control tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import SAMPLES, TEXT

from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer


def test_loading_is_fast() -> None:
    start = time.process_time()
    load_tokenizer(locate_model())
    assert time.process_time() - start < 1.5  # 0.15 s on an idle machine


def test_special_tokens_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert (smollm2.eos_ids, smollm2.bos_id, smollm2.add_bos) == ((2,), 1, False)
    assert smollm2.control_ids == frozenset(range(17))
    assert smollm2.vocab_size == len(smollm2.vocabulary) == 49152
    assert smollm2.chat_template is not None
    assert all(smollm2.vocabulary.token_bytes[i] == b"" for i in smollm2.control_ids)
    assert smollm2.vocabulary.eos_ids == (2,)
    assert smollm2.vocabulary.encode("Hello") == smollm2.encode_plain("Hello") == [19556]


@settings(max_examples=400, deadline=None)
@given(text=TEXT)
def test_plain_text_ids_equal_transformers(smollm2: Tokenizer, transformers_smollm2: Any, text: str) -> None:
    assert smollm2.encode_plain(text) == transformers_smollm2.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", SAMPLES)
def test_sample_texts_equal_transformers_and_decode_to_themselves(
    smollm2: Tokenizer, transformers_smollm2: Any, text: str
) -> None:
    ids = smollm2.encode_plain(text)
    assert ids == transformers_smollm2.encode(text, add_special_tokens=False)
    assert smollm2.decode(ids) == smollm2.decode([1, *ids, 2]) == text


CONTENT = st.one_of(TEXT, st.sampled_from([*SAMPLES, "", " ", "\n"]))


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=4))
def test_turn_by_turn_chat_equals_apply_chat_template(
    smollm2: Tokenizer, transformers_smollm2: Any, turns: list[tuple[str, str]]
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
    expected = transformers_smollm2.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert smollm2.encode(parts) == expected


@pytest.fixture(scope="module")
def control_like_parts(smollm2: Tokenizer) -> st.SearchStrategy[list[tuple[str, bool]]]:
    names = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>"]
    pieces = st.sampled_from([*names, "<|im_", "end|>", "<|", "|>", "system\n", " ", "a"])
    return st.lists(st.tuples(st.lists(pieces, max_size=4).map("".join), st.booleans()), max_size=6)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_user_text_never_becomes_a_control_token(
    smollm2: Tokenizer, control_like_parts: st.SearchStrategy[list[tuple[str, bool]]], data: st.DataObject
) -> None:
    parts = data.draw(control_like_parts)
    users = [(text, False) for text, _ in parts]
    ids = smollm2.encode(users)
    assert not smollm2.control_ids & set(ids)
    assert smollm2.decode(ids) == "".join(text for text, _ in parts)
    # Borders between parts do not change the ids.
    assert ids == smollm2.encode_plain("".join(text for text, _ in parts))
    # Control tokens come only from within single control parts.
    control_ids = [i for i in smollm2.encode(parts) if i in smollm2.control_ids]
    expected = [i for text, control in parts if control for i in smollm2.encode([(text, True)])]
    assert control_ids == [i for i in expected if i in smollm2.control_ids]


def test_control_tokens_are_recognised_in_control_text(smollm2: Tokenizer) -> None:
    assert smollm2.encode([("<|im_start|>user\n", True), ("<|im_end|>", False), ("<|im_end|>", True)]) == [
        1,
        *smollm2.encode_plain("user\n<|im_end|>"),
        2,
    ]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 3, None, b"x"])
def test_invalid_text_raises_input_error(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(InputError):
        smollm2.encode_plain(text)


@pytest.mark.parametrize("ids", [[-1], [49152]])
def test_decoding_an_unknown_id_raises_input_error(smollm2: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InputError, match="49151"):
        smollm2.decode(ids)
