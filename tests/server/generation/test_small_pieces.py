"""The pieces of work on large requests are small: counted in threads and in passes of the event loop, not timed."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from plait.runtime.errors import ContextOverflow
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat import engine
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.generation import submission
from plait.runtime.server.http import json_body, json_limits
from plait.runtime.server.protocols.sglang.types import GenerateRequest
from plait.runtime.tokenizer import tokenizer as tokenizer_module
from plait.runtime.tokenizer.tokenizer import load_tokenizer

SENTENCE = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate_model())


@pytest.mark.parametrize(("num_chars", "is_aside"), [(5_000, False), (18_994, True)])
def test_texts_of_more_than_5000_characters_are_tokenized_aside(tokenizer, num_chars, is_aside):
    threads = []

    class Recorded:
        add_bos, bos_id, vocabulary = False, None, tokenizer.vocabulary

        def encode(self, parts, *, at_start, max_tokens=None):
            threads.append(threading.get_ident())
            return tokenizer.encode(parts, at_start=at_start)

    client = SimpleNamespace(tokenizer=Recorded(), model=SimpleNamespace(context_length=8192))
    assert asyncio.run(submission.tokenize(client, [((SENTENCE * 500)[:num_chars], False)]))
    assert (threads[0] != threading.get_ident()) == is_aside


def test_what_is_tokenized_aside_releases_the_interpreters_lock():
    assert tokenizer_module.LONG_TEXT_CHARS <= submission.TOKENIZE_IN_THREAD_CHARS


def test_128_small_tools_are_prepared_aside():
    schema = {"type": "object", "properties": {}}
    conversation = Conversation((Turn("user", "hi"),), (ToolDefinition("f", "", schema),) * 128)
    assert engine.has_more_values(conversation, engine.CONVERT_IN_THREAD_VALUES)


def test_a_body_of_short_strings_is_scanned_in_pieces_of_128_kib():
    body = b'"", ' * (1 << 16) + b" " * (3 << 18)
    assert sum(1 for _ in json_limits.scan_steps(body, json_limits.JsonScan())) == len(body) >> 17 == 8


def test_the_loop_serves_others_between_the_checks_of_a_body_and_around_its_conversion(monkeypatch):
    events, convert = [], json_body.convert_json

    def recorded(value, kind):
        events.append("convert")
        return convert(value, kind)

    def scan_at_once(body, scan):  # its pieces are not counted here
        scan.num_keys = 1
        return iter(())

    monkeypatch.setattr(json_body, "convert_json", recorded)
    monkeypatch.setattr(json_body, "scan_steps", scan_at_once)
    body = json.dumps({"input_ids": [[i % 1000 for i in range(8000)]] * 60}).encode()

    async def read_body():
        return body

    async def run():
        async def others():
            while True:
                events.append("others")
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        request = SimpleNamespace(headers={"content-type": "application/json"}, body=read_body)
        value = await json_body.read_json(request, GenerateRequest)
        events.append("end")
        task.cancel()
        return value

    assert len(asyncio.run(run()).input_ids) == 60
    at = events.index("convert")
    assert at >= 480_000 // 24_000 and events[at - 1 : at + 3] == ["others", "convert", "others", "end"]


def test_the_ids_of_a_text_beyond_any_prompt_are_not_made(tokenizer, monkeypatch):
    monkeypatch.setattr(submission, "MAX_TOKENS_OF_TEXT", 10_000)
    client = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(context_length=8192))
    assert len(asyncio.run(submission.tokenize(client, [("<" * 16_000, False)]))) == 8000
    with pytest.raises(ContextOverflow, match="10001 tokens, more than any prompt"):
        asyncio.run(submission.tokenize(client, [("<" * 20_002, False)]))
