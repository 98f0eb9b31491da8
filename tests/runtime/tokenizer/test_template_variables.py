"""Chat templates with further variables, and templates that rewrite earlier answers, such as Qwen3's."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, messages, template
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_template import QWEN3

from plait.runtime.errors import InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate

NO_REASONING = "<think>\n\n</think>\n\n"
OPTIONAL_THINKING = CHATML + "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
# Renders an answer differently when another turn follows, and has no generation prompt.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}</{{ m.role }}>{% endfor %}"
)
roles_of_chats = st.lists(st.sampled_from(["user", "assistant"]), max_size=6).map(lambda rest: ["user", *rest])


def turn_by_turn(ours: ChatTemplate, roles: list[str], contents: list[str]) -> str:
    return "".join(
        ours.turn_prefix(roles[:i], role) + contents[i] + ours.turn_suffix(roles[:i], role)
        for i, role in enumerate(roles)
    )


@settings(max_examples=60, deadline=None)
@given(roles_of_chats, st.booleans(), st.sampled_from([None, True, False]))
def test_qwen3_text_is_what_successive_requests_would_have_sent(roles, has_system, enable_thinking) -> None:
    """Before an answer the text is the prompt of transformers, but that earlier answers keep their beginning."""
    variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    ours = template(QWEN3).with_variables(variables)
    roles = ["system"] * has_system + roles
    contents = [f"text {i}" for i in range(len(roles))]
    text = turn_by_turn(ours, roles, contents) + ours.turn_prefix(roles, "assistant")
    chat = [{"role": "user" if role == "assistant" else role, "content": "x"} for role in roles]
    chat = messages([message["role"] for message in chat], contents)  # no answer, so nothing is rewritten
    expected = template(QWEN3).render(chat, add_generation_prompt=True, variables=variables)
    opening = "<|im_start|>assistant\n" + (NO_REASONING if enable_thinking is False else "")
    for role, content in zip(roles, contents, strict=True):
        if role == "assistant":
            expected = expected.replace(f"<|im_start|>user\n{content}<", f"{opening}{content}<")
    assert text == expected


def test_a_template_without_a_generation_prompt_that_rewrites_answers() -> None:
    ours = template(REWRITING)
    assert turn_by_turn(ours, ["user", "assistant", "user"], ["a", "b", "c"]) == (
        "<user>a</user><assistant>b</assistant><user>c</user>"
    )


def test_with_variables_an_answer_begins_with_the_generation_prompt() -> None:
    plain, off = template(OPTIONAL_THINKING), template(OPTIONAL_THINKING).with_variables({"enable_thinking": False})
    prefix = plain.turn_prefix(["user"], "assistant")
    assert off.turn_prefix(["user"], "assistant") == prefix + "<think></think>"
    assert off.turn_prefix(["user", "assistant"], "user") == plain.turn_prefix(["user", "assistant"], "user")


def test_equal_variables_are_one_template() -> None:
    base = template(QWEN3)
    off = base.with_variables({"enable_thinking": False})
    assert base.with_variables({"enable_thinking": False}) is off and base.with_variables({}) is base
    assert base.with_variables({"enable_thinking": True}) is not off
    for number in range(40):
        base.with_variables({"enable_thinking": number})
    assert len(base._variants) == 16


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"enable_thinkin": False}, "no variable 'enable_thinkin'; it has: .*enable_thinking"),
        ({"messages": []}, "'messages' is set by the server"),
        ({"enable_thinking": {1, 2}}, "must be JSON"),
    ],
)
def test_wrong_variables(variables, message) -> None:
    with pytest.raises(InputError, match=message) as caught:
        template(QWEN3).with_variables(variables)
    assert caught.value.field == "chat_template_kwargs"


def test_a_template_that_does_not_parse_has_no_variables() -> None:
    assert template("{% for %}{{ x }}").variable_names == frozenset()
