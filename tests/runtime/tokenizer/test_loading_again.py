"""A tokenizer is read once in a process, and again when its files have changed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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


def test_clients_that_load_at_the_same_time_read_it_once(tmp_path, monkeypatch):
    """As those of replicas do. The definition of a folder is kept too."""
    path, folder = write_small_model(tmp_path / "model.gguf"), tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    definition = module._read(path, None)
    read, may_go_on = [], threading.Event()

    def slow(path, vocab_size):
        read.append(path)
        assert may_go_on.wait(30)
        return definition

    monkeypatch.setattr(module, "_read", slow)
    for place in (path, folder):
        module._definition_of.cache_clear()
        may_go_on.clear()
        with ThreadPoolExecutor(4) as pool:
            loaded = [pool.submit(load_tokenizer, place) for _ in range(4)]
            while place not in read:
                time.sleep(0.001)
            time.sleep(0.05)  # the others have begun
            may_go_on.set()
        assert len({id(one.result()._definition) for one in loaded}) == 1
        assert read.count(place) == 1
    (folder / "tokenizer.json").write_text("{ }")
    load_tokenizer(folder)
    assert read.count(folder) == 2
    module._definition_of.cache_clear()
