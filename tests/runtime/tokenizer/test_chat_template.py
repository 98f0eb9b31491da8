"""Chat templates: the rendered text equals that of transformers, and turns can be separated."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from chat_templates import CHATML, messages, template
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_template import QWEN3
from transformers import PreTrainedTokenizerFast

from plait.runtime.errors import InputError
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.chat_template import ChatTemplate

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}"
    "{% if not loop.last or m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The system turn goes into the first user turn, and the roles must alternate.
INST = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = none %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and sys is not none %}<<SYS>>\n{{ sys }}\n<</SYS>>\n\n"
    "{% endif %}{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Renders an assistant turn differently when another turn follows.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}</{{ m.role }}>{% endfor %}"
)


@pytest.fixture(scope="module")
def smollm2() -> str:
    source = open_gguf(locate_model(), metadata_only=True).metadata["tokenizer.chat_template"]
    assert isinstance(source, str)
    return source


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """Renders the templates that it is given; its vocabulary is empty."""
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=empty, bos_token="<s>", eos_token="</s>")


ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=6)
WORDS = st.text(alphabet="ab{%<|>}\n é", min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", ["smollm2", "chatml", "llama3", "trimmed"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_turn_by_turn_text_equals_the_rendered_conversation(
    smollm2: str, transformers_tokenizer: Any, name: str, data: st.DataObject
) -> None:
    source = {"smollm2": smollm2, "chatml": CHATML, "llama3": LLAMA3, "trimmed": TRIMMED}[name]
    ours = template(source)
    roles = data.draw(ROLES)
    contents = [data.draw(WORDS) for _ in roles]
    text = "".join(
        ours.turn_prefix(roles[:i], role) + contents[i] + ours.turn_suffix(roles[:i], role)
        for i, role in enumerate(roles)
    )
    chat = messages(roles, contents)
    assert text == ours.render(chat)
    for prompt in (False, True):
        expected = transformers_tokenizer.apply_chat_template(
            chat, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.render(chat, add_generation_prompt=prompt) == expected
    if name != "trimmed":  # this template ends the last turn only if an answer follows
        assert text + ours.turn_prefix(roles, "assistant") == ours.render(chat, add_generation_prompt=True)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_system_turn_inside_the_first_user_turn(system: bool, rounds: int) -> None:
    ours = template(INST)
    roles = ["system"] * system + ["user", "assistant"] * rounds
    contents = [f"text {i}" for i in range(len(roles))]
    pieces = [(ours.turn_prefix(roles[:i], r), ours.turn_suffix(roles[:i], r)) for i, r in enumerate(roles)]
    text = "".join(before + c + after for (before, after), c in zip(pieces, contents, strict=True))
    assert text == ours.render(messages(roles, contents))
    if system:
        assert pieces[0] == ("<s>[INST] <<SYS>>\n", "")
        assert pieces[1] == ("\n<</SYS>>\n\n", " [/INST]")


def test_the_embedded_models_default_system_turn(smollm2: str) -> None:
    ours = ChatTemplate(smollm2, "<|im_start|>", "<|im_end|>")
    first = ours.turn_prefix([], "user")
    assert first.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert first.endswith("<|im_end|>\n<|im_start|>user\n")
    assert ours.turn_prefix([], "system") == "<|im_start|>system\n"
    assert ours.turn_prefix(["user"], "assistant") == "<|im_start|>assistant\n"
    assert ours.turn_suffix(["user"], "assistant") == "<|im_end|>\n"


def test_templates_whose_turns_cannot_be_separated_raise() -> None:
    with pytest.raises(InputError, match="roles must alternate"):
        template(INST).turn_prefix(["user"], "user")
    with pytest.raises(InputError, match="content"):
        template("{% for m in messages %}{{ m.content | upper }}{% endfor %}").turn_prefix([], "user")
    with pytest.raises(InputError, match="roles are texts"):
        template(CHATML).turn_prefix([3], "user")  # type: ignore[list-item]


def test_the_generation_prompt_replaces_a_turn_that_cannot_be_last() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert template(source).turn_prefix(["user"], "assistant") == "<assistant>"


def test_cached_turns_take_microseconds() -> None:
    ours, roles = template(CHATML), ["user", "assistant"] * 20
    ours.turn_prefix(roles, "user")
    start = time.process_time()
    for _ in range(1000):
        ours.turn_prefix(roles, "user")
    assert time.process_time() - start < 0.1  # 2 us each on an idle machine


def test_jinja_features_of_transformers_are_available(transformers_tokenizer: Any) -> None:
    source = (
        "{%- for m in messages %}{%- if loop.index > 3 %}{% break %}{% endif %}{% if not m.content %}{% continue %}"
        "{% endif %}\n    {% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i * 2 %}{% endfor %}"
        "{{ ns.n }} {{ m | tojson }} {{ {'b': 'é<', 'a': [1, none]} | tojson(indent=2) }} {{ m.content.strip() }}"
        "{{ m.items() | list }} {{ m.role ~ 1 ~ 'x' }} {{ ['a', 'b'] | join(', ') }} {{ 'a%s' % 3 }}"
        "{{ m.content.split('b')[-1] }} {{ m.content | replace('a', 'z') | upper }} {{ (1, 2) + (3,) }}"
        " {{ x is defined }}"
        "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(m.role) }} {{ m.content[:2] }} {{ messages | length }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ 'q'.replace('q', 'r') }} {{ ''.join(['a', 'b']) }}"
        "{% endfor %}{{ tools | tojson }}{{ tools[0].function.name if tools }}{{ 7 // 2 + 2 ** 3 }}{{ 'ab' * 2 }}"
        "{% for key, value in {'k': 1}.items() %}{{ key }}={{ value }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = messages(["user", "assistant", "user", "user"], ["cab é\n", "", "a", "late"])
    expected = transformers_tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False, tools=tools)
    assert template(source).render(chat, tools=tools) == expected


def test_strftime_now_writes_the_current_date() -> None:
    ours = template("{{ strftime_now('%Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}")
    assert ours.turn_prefix([], "user") == f"{datetime.now():%Y}|"


ENDS = {
    "as Phi 3.5": ("{{ eos_token }}", "<assistant>a</assistant>", "<user>"),
    "as gpt-oss": (
        "{% if messages[-1].role == 'assistant' %}<|return|>{% endif %}",
        "<assistant>a",
        "</assistant><user>",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_conversation_is_no_part_of_a_turn_that_another_follows(name: str) -> None:
    """The last answer of gpt-oss ends with a text of its own, and Phi 3.5 writes one behind it."""
    end, answer, prefix = ENDS[name]
    closing = "{% if not loop.last or m.role == 'user' %}</{{ m.role }}>{% endif %}"
    closing = closing if name == "as gpt-oss" else "</{{ m.role }}>"
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + closing + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}" + end + "{% endif %}"
    )
    ours, roles = template(source), ["user"]
    assert ours.turn_prefix(roles, "assistant") + "a" + ours.turn_suffix(roles, "assistant") == answer
    assert ours.turn_prefix([*roles, "assistant"], "user") == prefix
    text, roles = "", []
    for role, content in (("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "")):
        text += ours.turn_prefix(roles, role) + content
        if content:
            text += ours.turn_suffix(roles, role)
        roles.append(role)
    assert text == ours.render(messages(["user", "assistant", "user"], ["q", "a", "r"]), add_generation_prompt=True)


def test_a_system_turn_of_a_template_that_rewrites_answers_and_needs_a_user() -> None:
    of_user = "messages | selectattr('role', 'equalto', 'user') | list"
    needs_user = f"{{% if not {of_user} %}}{{{{ raise_exception('no user') }}}}{{% endif %}}"
    chat_template, text = template(needs_user + QWEN3), ""
    roles, contents = ["system", "user", "assistant", "user"], ["be brief", "hi", "hello", "and now"]
    for number, (role, content) in enumerate(zip(roles, contents, strict=True)):
        texts = chat_template.turn_prefix(roles[:number], role), chat_template.turn_suffix(roles[:number], role)
        text += texts[0] + content + texts[1]
    assert text == chat_template.render(messages(roles, contents))
    assert chat_template.turn_suffix([], "system") == "", "it cannot be the last turn"
