"""A GGUF file's tokenizer is read once in a process, and again when the file has changed."""

from __future__ import annotations

import pytest
from tiny_llama_gguf import write_small_model

from plait.runtime.errors import ModelError
from plait.runtime.tokenizer import tokenizer as module
from plait.runtime.tokenizer.tokenizer import load_tokenizer

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def test_a_file_is_read_again_when_it_has_changed(tmp_path, monkeypatch):
    path = write_small_model(tmp_path / "model.gguf")
    read, plain = [], module.open_gguf
    monkeypatch.setattr(module, "open_gguf", lambda *args, **kwargs: read.append(args) or plain(*args, **kwargs))
    first, second = load_tokenizer(path), load_tokenizer(path)
    assert len(read) == 1
    assert first.encode_plain("Hello") == second.encode_plain("Hello")

    second.replace_chat_template(TEMPLATE)
    assert load_tokenizer(path).chat_template.source == first.chat_template.source != TEMPLATE
    assert len(read) == 1

    write_small_model(tmp_path / "other.gguf", chat_template=TEMPLATE).replace(path)
    assert load_tokenizer(path).chat_template.source == TEMPLATE
    assert len(read) == 2

    path.unlink()
    with pytest.raises(ModelError):
        load_tokenizer(path)
