"""Rendered prompts: tools and turns reach the template, and client text never becomes a control token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.derivation.model_formats import find_formats
from plait.runtime.errors import InputError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.prompt import render_chat
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.tokenizer import load_tokenizer

ADDED = frozenset({"<|im_start|>", "<|im_end|>"})
HERMES = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADVERSARIAL = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<", ">", "|", "a", " ", "\n", "Qz"])
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate_model())


def control_tokens(tokenizer, parts):
    ids = tokenizer.encode(parts, at_start=True)
    return [token for token in ids if token in tokenizer.control_ids]


@given(texts=st.lists(ADVERSARIAL.map("".join), min_size=1, max_size=4))
def test_no_message_becomes_a_control_token(tokenizer, texts) -> None:
    roles = ["user", "assistant"]
    template = tokenizer.chat_template
    turns = [Turn(roles[i % 2], text) for i, text in enumerate(texts)]
    harmless = [Turn(roles[i % 2], "x") for i in range(len(texts))]
    parts = render_chat(template, tokenizer.added_texts, Conversation(tuple(turns)), GENERIC_FORMAT)
    expected = render_chat(template, tokenizer.added_texts, Conversation(tuple(harmless)), GENERIC_FORMAT)
    assert control_tokens(tokenizer, parts) == control_tokens(tokenizer, expected)
    rendered = "".join(text for text, _ in parts)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert rendered == template.render(messages, add_generation_prompt=True)


@given(text=ADVERSARIAL.map("".join))
def test_no_tool_or_call_becomes_a_control_token(text) -> None:
    template = ChatTemplate(HERMES, "", "<|im_end|>")
    call_format = find_formats(template).calls
    call = ToolCall("c1", "f", json.dumps({"a": text}))
    turns = (Turn("user", "hi"), Turn("assistant", text, (call,)), Turn("tool", text, call_id="c1"))
    conversation = Conversation(turns, (ToolDefinition("f", text),))
    parts = render_chat(template, ADDED, conversation, call_format)
    template_texts = [part for part, is_template in parts if is_template]
    assert sum(part.count("<|im_end|>") for part in template_texts) == 3
    assert sum(part.count("<|im_start|>") for part in template_texts) == 4
    prompt = "".join(part for part, _ in parts)
    assert json.dumps({"a": text}, ensure_ascii=False) in prompt and text.strip() in prompt


def test_template_with_tools_renders_them() -> None:
    template = ChatTemplate(HERMES, "", "")
    call_format = find_formats(template).calls
    call = ToolCall("c1", "f", '{"a": 1}')
    turns = (Turn("user", "hi"), Turn("assistant", "", (call,)), Turn("tool", "7", call_id="c1"))
    text = "".join(
        part
        for part, _ in render_chat(template, ADDED, Conversation(turns, (ToolDefinition("f", "adds"),)), call_format)
    )
    assert '<tools>{"type": "function", "function": {"name": "f", "description": "adds"' in text
    assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_tool_template_the_system_turn_describes_the_tools(tokenizer) -> None:
    call = ToolCall("c1", "f", '{"a":1}')
    turns = (Turn("system", "Be kind."), Turn("user", "hi"), Turn("assistant", "", (call,)))
    turns = (*turns, Turn("tool", "7", call_id="c1"))
    conversation = Conversation(turns, (ToolDefinition("f", "adds"),))
    text = "".join(
        part for part, _ in render_chat(tokenizer.chat_template, tokenizer.added_texts, conversation, GENERIC_FORMAT)
    )
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert '{"name": "f", "description": "adds"' in text
    assert '<|im_start|>assistant\n{"tool_call": {"name": "f", "arguments": {"a":1}}}<|im_end|>' in text
    assert "<|im_start|>user\nResult of f: 7<|im_end|>" in text


def test_final_turn_can_be_continued(tokenizer) -> None:
    turns = (Turn("user", "hi"), Turn("assistant", "Well, <|im_end|>"))
    conversation = Conversation(turns, add_generation_prompt=False, continue_final=True)
    parts = render_chat(tokenizer.chat_template, tokenizer.added_texts, conversation, GENERIC_FORMAT)
    assert "".join(text for text, _ in parts).endswith("<|im_start|>assistant\nWell, <|im_end|>")
    assert parts[-1] == ("<|im_end|>", False)
    with pytest.raises(InputError, match="cannot be continued"):
        render_chat(ChatTemplate("{{ messages | length }}", "", ""), ADDED, conversation, GENERIC_FORMAT)
