"""`/v1/completions` and `/v1/models` with OpenAI's client."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion, Model

MODEL = "default"


def tokens_with_offsets(choice):
    """(token, offset in the text) of every token."""
    return list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))


def create_and_stream(client, **request):
    """The completion, after a check that its stream gives the same."""
    request = {"model": MODEL, "temperature": 0, **request}
    completion = client.completions.create(**request)
    assert isinstance(completion, Completion)
    texts, finish_reasons, tokens, usage = {}, {}, {}, None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finish_reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(tokens_with_offsets(choice))
    assert texts == {choice.index: choice.text for choice in completion.choices}
    assert finish_reasons == {choice.index: choice.finish_reason for choice in completion.choices}
    for choice in completion.choices:
        if choice.logprobs:
            assert tokens[choice.index] == tokens_with_offsets(choice)
    assert usage.prompt_tokens == completion.usage.prompt_tokens
    assert usage.completion_tokens == completion.usage.completion_tokens
    return completion


def test_prompts_as_text_tokens_and_lists(client, smollm) -> None:
    paris = create_and_stream(smollm, prompt="The capital of France is", max_tokens=2)
    assert paris.choices[0].text == " Paris."
    by_text = create_and_stream(client, prompt="The capital of France is", max_tokens=2)
    assert by_text.choices[0].text and by_text.choices[0].finish_reason == "length"
    by_tokens = create_and_stream(client, prompt=[504, 3575, 282, 4649, 314], max_tokens=2)
    assert by_tokens.choices[0].text == by_text.choices[0].text
    assert by_tokens.usage.prompt_tokens == by_text.usage.prompt_tokens == 5
    many = create_and_stream(client, prompt=["The capital of France is", "One, two,"], max_tokens=3, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text != many.choices[2].text
    assert many.usage.completion_tokens == 12
    lists = create_and_stream(client, prompt=[[504, 3575, 282, 4649, 314], [504]], max_tokens=1)
    assert len(lists.choices) == 2


def test_default_max_tokens_and_echo(client) -> None:
    answer = create_and_stream(client, prompt="Once upon", echo=True)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].text.startswith("Once upon")
    only = create_and_stream(client, prompt="Once upon", echo=True, max_tokens=0)
    assert only.choices[0].text == "Once upon" and only.usage.completion_tokens == 0


def test_logprobs(client) -> None:
    answer = create_and_stream(client, prompt="The capital of France is", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [0, lengths[0], lengths[0] + lengths[1]]
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    assert max(logprobs.top_logprobs[0].values()) == logprobs.token_logprobs[0]


def test_echoed_logprobs_are_those_of_the_prompt(client) -> None:
    """A prompt's logprobs are what the model would have given its tokens while it wrote them."""
    prompt = "My name"  # the tokenizer splits its answer into the tokens that were generated
    written = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logprobs=1).choices[0]
    text = prompt + written.text
    echoed = create_and_stream(client, prompt=text, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert echoed.text == text
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
    assert "".join(echoed.logprobs.tokens) == text
    assert "".join(written.logprobs.tokens) == "".join(echoed.logprobs.tokens[2:])
    assert echoed.logprobs.token_logprobs[2:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)
    assert echoed.logprobs.text_offset[:3] == [0, 2, 7]
    longer = create_and_stream(client, prompt=prompt, echo=True, logprobs=1, max_tokens=6).choices[0]
    assert longer.logprobs.tokens == echoed.logprobs.tokens


def test_best_of(client) -> None:
    request = {"model": MODEL, "prompt": "My favourite", "seed": 5, "max_tokens": 5, "logprobs": 0}
    every = client.completions.create(**request, n=6)
    best = client.completions.create(**request, n=2, best_of=6)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_constraints_and_stops(client) -> None:
    assert create_and_stream(client, prompt="A number:", extra_body={"regex": " [0-9]{4}"}).choices[0].text[0] == " "
    text = create_and_stream(client, prompt="1, 2, 3, 4, 5,", max_tokens=8).choices[0].text
    answer = create_and_stream(client, prompt="1, 2, 3, 4, 5,", stop=["never", text[9:12]], max_tokens=20)
    assert answer.choices[0].text == text[: text.index(text[9:12])] and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
    ],
)
def test_errors_name_the_parameter(client, wrong, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "a", **wrong})
    assert caught.value.param == param


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert isinstance(model, Model) and model.object == "model" and model.max_model_len == 8192
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_token_list_longer_than_the_context(http) -> None:
    answer = http.post("/v1/completions", json={"model": "default", "prompt": [*[1] * 50_000, -1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
