"""Tool calls of programs on the embedded model, with a chat template of our own for each form of calls."""

from __future__ import annotations

import asyncio

import jsonschema
import pytest
from call_templates import CALL_TEMPLATES, CONTROL_TEMPLATE
from example_share import sample_of
from message_templates import RECIPIENTS

import plait
from plait import Tool, assistant, gen, user
from plait.runtime.sampling_params import sampling_params

# Few texts of such a call have more than one tokenization, so the model writes the tokenizer's own.
LEVEL = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["level", "on"],
}
TOOLS = [Tool("set_light", "Sets the light.", LEVEL), Tool("add_light", "Adds a light.", LEVEL)]
MARK = "{# 'tool' #}"  # a template that knows results names their role
# Messages whose marks are control tokens of SmolLM2.
CONTROL_MESSAGES = (
    RECIPIENTS.replace("<|start|>", "<jupyter_start>").replace("<|end|>", "<repo_name>").replace(">>>", "<file_sep>")
)
TEMPLATES = {kind: template.source for kind, template in CALL_TEMPLATES.items()} | {
    "control tokens": CONTROL_TEMPLATE.source,
    "messages": CONTROL_MESSAGES,
}
WITH_IDS = ("list with ids", "id before the arguments")  # the model writes any id
KINDS = ["control tokens", "messages", *sample_of([kind for kind in CALL_TEMPLATES if kind not in WITH_IDS], least=5)]


@pytest.fixture
def backend(runtime):
    """`backend(kind)`: the model with the template of that kind."""
    tokenizer = runtime.client.tokenizer
    own = tokenizer.chat_template.source

    def with_template(kind):
        tokenizer.replace_chat_template(TEMPLATES[kind] + MARK)
        return runtime

    yield with_template
    tokenizer.replace_chat_template(own)


def ask(s):
    s += user("Set the light to level 7.") + assistant(
        gen("call", tools=TOOLS, tool_choice="set_light", max_tokens=120)
    )


@plait.function
def program(s):
    ask(s)
    s.tool_result("call", "done")
    s += assistant(gen("answer", regex="ok[a-z]{2}"))


@plait.function
async def async_program(s):
    ask(s)
    await s.tool_result("call", "done")
    s += assistant(gen("answer", regex="ok[a-z]{2}"))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_call_is_valid_and_the_rendered_conversation_is_cached(backend, kind, is_async) -> None:
    model = backend(kind)
    options = {"backend": model, "temperature": 0}
    state = asyncio.run(async_program.arun(**options)) if is_async else program.run(**options)
    call, answer = state["call"], state["answer"]
    jsonschema.validate(call.arguments, dict(call.tool.parameters))
    made = {"id": "000000000", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "Set the light to level 7."},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "done", "tool_call_id": "000000000", "name": call.name},
        {"role": "assistant", "content": answer},
    ]
    text = model.client.tokenizer.chat_template.render(messages)
    assert state.text() == text
    session = model.client.open_session()
    session.append(text.rpartition(answer)[0], control=True)  # as a server sends the same conversation
    usage = session.generate(sampling_params(max_tokens=1)).result().usage
    session.close()
    assert usage.cached_tokens >= state.get_meta_info("answer")["prompt_tokens"] - 1


@pytest.mark.parametrize("kind", ["control tokens", "messages"])
def test_stream_of_a_call_has_its_control_tokens(backend, kind) -> None:
    state = program.run(backend=backend(kind), temperature=1.0, seed=3, stream=True)
    assert "".join(state.text_iter("call")) == state.text_of("call")
    assert ("<repo_name><reponame>" in state.text_of("call")) == (kind == "control tokens")


def test_joined_call_keeps_its_control_tokens(backend) -> None:
    @plait.function
    def joined(s):
        s += user("Set the light to level 7.")
        fork = s.fork(1)
        fork[0] += assistant(gen("call", tools=TOOLS, max_tokens=120))
        fork.join("concate_and_append")
        s += assistant(gen("answer", max_tokens=2))

    model = backend("control tokens")
    state = joined.run(backend=model, temperature=1.0, seed=7)
    tokenizer = model.client.tokenizer
    num_tokens = len(tokenizer.encode([(state.text().rpartition(state["answer"])[0], True)], at_start=True))
    assert state.get_meta_info("answer")["prompt_tokens"] == num_tokens
