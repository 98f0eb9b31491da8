"""Large requests leave the event loop to others: their work yields to it, or runs in a thread. Counted, not timed."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.engine import has_more_values
from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation.submission import YIELD_AFTER_CHARS, tokenize
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.protocols.openai.completions import CompletionRequest, _check
from plait.runtime.tokenizer import tokenizer as tokenizer_module
from plait.runtime.tokenizer.tokenizer import load_tokenizer

SENTENCE = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate_model())


async def loop_passes(work):
    """How many times the event loop ran another task during `work`."""
    num_passes = 0

    async def count():
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += 1

    counter = asyncio.create_task(count())
    await asyncio.sleep(0)
    num_passes = 0
    await work
    counter.cancel()
    return num_passes


@pytest.mark.parametrize(("length", "passes"), [(YIELD_AFTER_CHARS, 0), (YIELD_AFTER_CHARS + 1, 5)])
def test_the_loop_serves_others_between_the_texts_of_a_request(tokenizer, length, passes):
    client = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(context_length=8192))

    async def tokenize_all():
        for _ in range(5):
            assert await tokenize(client, [((SENTENCE * 40)[:length], False)])

    assert asyncio.run(loop_passes(tokenize_all())) == passes


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer):
    thread = threading.Thread(target=tokenizer.encode_plain, args=(SENTENCE * 20_000,))
    num_ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_ticks += 1
    assert num_ticks > 5  # 2 if the interpreter's lock is held


def test_long_texts_have_the_same_tokens_as_short_ones(tokenizer, monkeypatch):
    texts = [SENTENCE, " \n\tx", "é漢字🙂 <|im_end|>", "a" * 3000, "1234567 " * 50]
    expected = [tokenizer.encode([(text, True)], at_start=True) for text in texts]
    monkeypatch.setattr(tokenizer_module, "LONG_TEXT_CHARS", 0)
    assert [tokenizer.encode([(text, True)], at_start=True) for text in texts] == expected


def test_the_turns_and_the_values_of_tools_are_counted():
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}}  # 12 values, the keys included
    conversation = Conversation((Turn("user", "hi"),), (ToolDefinition("f", "", schema),) * 3)
    assert has_more_values(conversation, 42) and not has_more_values(conversation, 43)


@pytest.mark.parametrize("is_large", [False, True])
def test_large_work_runs_in_another_thread(is_large):
    thread = asyncio.run(run_in_thread_if(is_large, threading.get_ident))
    assert (thread != threading.get_ident()) == is_large


@pytest.mark.parametrize("prompt", [["a"] * 65, [[1]] * 65])
def test_too_many_prompts_are_refused_before_they_are_tokenized(prompt):
    state = SimpleNamespace(settings=SimpleNamespace(max_choices=128))  # a use of its client would fail
    body = CompletionRequest(model="default", prompt=prompt, n=2)
    with pytest.raises(ApiError, match="prompts times choices must not exceed 128") as caught:
        asyncio.run(_check(body, state, "", ""))
    assert caught.value.param == "prompt"
