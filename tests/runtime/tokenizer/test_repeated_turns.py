"""Long conversations turn by turn: the same text as from a rendering of all turns, from few renderings."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, template
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_template import QWEN3

from plait.runtime.errors import InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.repeated_turns import FIRST_TURNS, MAX_LENGTH, PERIOD, without_middle

ONE = "<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen3": QWEN3,
    "parity": "{% for m in messages %}{{ loop.index0 % 4 }}" + ONE + "{% endfor %}",
    "the turn before": "{% for m in messages %}{{ loop.previtem.role }}" + ONE + "{% endfor %}",
    "the number of the turn": "{% for m in messages %}{{ loop.index }}" + ONE + "{% endfor %}",
    "a counter": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}[{{ ns.n }}]{% endif %}" + ONE + "{% endfor %}",
    "other text after 20 turns": "{% for m in messages %}{% if loop.index > 20 %}late {% endif %}"
    + ONE
    + "{% endfor %}",
    "other text after 300 turns": "{% for m in messages %}{% if loop.index > 300 %}late {% endif %}"
    + ONE
    + "{% endfor %}",
    "a system turn seen before": "{% for m in messages %}{% if m.role == 'system' %}{% set x = 1 %}{% endif %}{{ "
    "messages | selectattr('role', 'equalto', 'system') | list | length if loop.index > 400 }}" + ONE + "{% endfor %}",
}


def separated(chat_template: ChatTemplate, roles: list[str], role: str) -> tuple[str, str] | None:
    """The text around the next turn, from a rendering of all turns; None if the template refuses them."""
    try:
        return chat_template._turn_texts._separate(tuple(roles), role)
    except InputError:
        return None


def turn(chat_template: ChatTemplate, roles: list[str], role: str) -> tuple[str, str] | None:
    try:
        return chat_template.turn_prefix(roles, role), chat_template.turn_suffix(roles, role)
    except InputError:
        return None


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "300" not in name and "seen" not in name])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_text_is_that_of_all_turns(name: str, data: st.DataObject) -> None:
    block = data.draw(st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), min_size=1, max_size=6))
    roles = (block * 90)[: data.draw(st.integers(0, 90))]
    roles += data.draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=6))
    chat_template, all_turns = template(TEMPLATES[name]), template(TEMPLATES[name])
    for role in ("user", "assistant"):
        assert turn(chat_template, roles, role) == separated(all_turns, roles, role)


def test_a_template_that_changes_after_many_turns_is_found_at_a_power_of_two() -> None:
    chat_template, all_turns = (template(TEMPLATES["other text after 300 turns"]) for _ in range(2))
    roles = ["user", "assistant"] * 256
    assert turn(chat_template, roles, "user") == separated(all_turns, roles, "user")
    assert turn(chat_template, roles, "user") == ("late <user>", "</user>")


@pytest.mark.parametrize("name", ["ChatML", "Qwen3", "parity"])
def test_turns_after_many_others_render_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_template, rendered = template(TEMPLATES[name]), 0
    render = chat_template.render

    def counted(messages, **options):  # type: ignore[no-untyped-def]
        nonlocal rendered
        rendered += len(messages)
        return render(messages, **options)

    monkeypatch.setattr(chat_template, "render", counted)
    roles: list[str] = []
    for _ in range(400):
        for role in ("user", "assistant"):
            turn(chat_template, roles, role)
            roles.append(role)
    assert rendered < 25_000  # 800 turns twice are 640,000
    assert chat_template.num_rendered_turns(800) == MAX_LENGTH + 1
    assert template(TEMPLATES["a counter"]).num_rendered_turns(800) == 801


@given(st.integers(0, 300))
def test_whole_periods_are_left_out(num_turns: int) -> None:
    turns = tuple(range(num_turns))
    shorter = without_middle(turns)
    assert shorter[:FIRST_TURNS] == turns[:FIRST_TURNS]
    assert shorter[-PERIOD:] == turns[-PERIOD:]
    assert (num_turns - len(shorter)) % PERIOD == 0
    assert len(shorter) <= MAX_LENGTH
