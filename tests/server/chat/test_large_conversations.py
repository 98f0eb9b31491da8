"""Long texts, schemas and arguments of a conversation: other threads run while they are prepared."""

from __future__ import annotations

import json
import threading
import time

import pytest
from call_templates import CALL_TEMPLATES
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.derivation.model_formats import find_formats
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.engine import CHARS_PER_VALUE, has_more_values
from plait.runtime.server.chat.prompt import ControlTokenEscaper, render_chat
from plait.runtime.server.chat.template_messages import parsed_arguments, tool_instructions
from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.json_limits import MAX_ELEMENTS
from plait.runtime.server.protocols.anthropic.request import _merge_same_role
from plait.runtime.tokenizer import json_text as json_text_module
from plait.runtime.tokenizer import literal_pattern as literal_pattern_module
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.json_text import json_text
from plait.runtime.tokenizer.literal_pattern import find_in_pieces, literal_pattern
from plait.runtime.tokenizer.template_sandbox import _filter_tojson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def num_ticks_beside(work):
    """How often this thread runs while another does `work`."""
    thread = threading.Thread(target=work)
    num_ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_ticks += 1
    return num_ticks


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation((Turn("user", "a" * CHARS_PER_VALUE * 100),)),
        Conversation((Turn("assistant", "", reasoning="a" * CHARS_PER_VALUE * 100),)),
        Conversation((Turn("assistant", "", (ToolCall("", "f", "a" * CHARS_PER_VALUE * 100),)),)),
        Conversation((Turn("assistant", "", (ToolCall("", "f", {"a": [1] * 100}),)),)),
        Conversation((Turn("user", "", name="a" * CHARS_PER_VALUE * 100),)),
        Conversation((Turn("user", ""),), (ToolDefinition("f", "a" * CHARS_PER_VALUE * 100),)),
        Conversation((Turn("user", ""),), (ToolDefinition("f", "", {"enum": [1] * 100}),)),
        Conversation((Turn("user", ""),), template_variables={"a": [1] * 100}),
        Conversation((Turn("user", ""),), template_variables={"a": {str(i): 1 for i in range(50)}}),
    ],
    ids=["text", "reasoning", "arguments", "object", "name", "description", "schema", "list", "variables"],
)
def test_every_long_part_of_a_conversation_counts(conversation):
    assert has_more_values(conversation, 99) and not has_more_values(conversation, 120)


@given(st.text(alphabet="<a>b", max_size=40), st.integers(1, 9))
def test_matches_in_pieces_are_those_in_the_whole_text(text, piece_chars):
    texts = ["<a>", "<a>b", "<<"]
    pattern = literal_pattern(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(literal_pattern_module, "PIECE_CHARS", piece_chars)
        found = [match.span() for match in find_in_pieces(pattern, text, 4)]
        escaper = ControlTokenEscaper(frozenset(texts))
        parts = escaper.restore(escaper.escape(text))
    assert found == [match.span() for match in pattern.finditer(text)]
    assert "".join(part for part, _ in parts) == text


def test_other_threads_run_while_control_tokens_are_searched():
    escaper = ControlTokenEscaper(frozenset({"<|im_start|>", "<|im_end|>", "<file_sep>"}))
    assert num_ticks_beside(lambda: escaper.escape("<|im_" * (3 << 20))) > 3


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_that_of_the_standard_library(value, ensure_ascii, indent):
    for limit in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_text_module, "LONG_JSON_BYTES", limit)
            text = json_text(value, ensure_ascii=ensure_ascii, indent=indent)
        assert text == json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


NUMBERS = [0.123456789] * 1_000_000


@pytest.mark.parametrize("written_by", ["arguments", "tools", "template"])
def test_other_threads_run_while_json_is_written(written_by):
    work = {
        "arguments": lambda: GENERIC_FORMAT.render_calls([("", "f", {"a": NUMBERS})]),
        "tools": lambda: tool_instructions([ToolDefinition("f", "", {"enum": NUMBERS})], GENERIC_FORMAT),
        "template": lambda: _filter_tojson(NUMBERS),
    }[written_by]
    assert num_ticks_beside(work) > 3


def test_arguments_with_too_many_elements_are_refused_before_they_are_parsed():
    many = "[" + "1," * (MAX_ELEMENTS + 1) + "1]"
    with pytest.raises(ApiError, match="the arguments of a tool call have more than 500000 elements") as caught:
        parsed_arguments(many)
    assert (caught.value.status, caught.value.code) == (400, "too_many_elements")


@pytest.mark.parametrize("text", ["no JSON", "{", '{"a": NaN}', "[" * 2000])
def test_arguments_that_are_no_json_stay_text(text):
    assert parsed_arguments(text) == text


def test_an_object_is_rendered_as_its_json():
    arguments = {"a": [1, "é"], "b": {}}
    template = ChatTemplate(CALL_TEMPLATES["json in tags"].source, "", "")
    native = find_formats(template).calls
    for call_format in (native, GENERIC_FORMAT):
        plain = ChatTemplate("{{ messages[0].content }}", "", "")
        used = template if call_format.is_native else plain
        of_object, of_text = (
            render_chat(
                used, frozenset(), Conversation((Turn("assistant", "", (ToolCall("c", "f", given),)),)), call_format
            )
            for given in (arguments, json.dumps(arguments, ensure_ascii=False))
        )
        assert of_object == of_text and '{"a": [1, "é"], "b": {}}' in of_object[0][0]


def test_many_messages_of_one_role_are_merged_in_one_pass():
    """In processor time of this thread, beside what joining their texts once takes."""
    turns = [Turn("user", "a" * 7000)] * 3000
    begun = time.thread_time()
    expected = "\n\n".join(turn.text for turn in turns)
    joining_s, begun = time.thread_time() - begun, time.thread_time()
    (merged,) = _merge_same_role(turns)
    assert merged.text == expected and time.thread_time() - begun < 20 * joining_s + 0.1
