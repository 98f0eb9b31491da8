"""Adapters of the embedded model, over HTTP and in sessions: chosen by name, and nothing of another's text is used."""

from __future__ import annotations

import httpx
import pytest
from embedded_adapters import write_adapter
from served_process import Served

import plait
from plait.constrained import Regex
from plait.runtime.sampling_params import sampling_params

PROMPT = "The capital of France is Paris, and the capital of Italy is"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def served(folders):
    server = Served(*(f"--lora={name}={folder}" for name, folder in folders.items()), "--model-name=base")
    yield server
    server.process.terminate()
    server.wait()


def ask(served, model, path="/v1/completions", **body):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | body
    return httpx.post(served.address + path, json=body, timeout=60)


def test_an_adapter_is_a_model_of_the_server(served):
    listed = {model["id"]: model for model in served.get("/v1/models").json()["data"]}
    assert list(listed) == ["base", "one", "two"]
    assert (listed["one"]["parent"], listed["one"]["root"]) == ("base", "one")
    assert listed["base"]["parent"] is None
    assert served.get("/v1/models/two").json()["parent"] == "base"
    refused = ask(served, "tow")
    assert refused.status_code == 404 and "did you mean 'two'?" in refused.json()["error"]["message"]


def test_every_protocol_computes_with_the_adapter_that_it_names(served):
    texts = {model: ask(served, model).json()["choices"][0]["text"] for model in ("base", "one", "two")}
    assert len(set(texts.values())) == 3
    for model, text in texts.items():
        raw = {"prompt": PROMPT, "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 12}}
        answer = httpx.post(f"{served.address}/api/generate", json={"model": f"{model}:latest", **raw}, timeout=60)
        assert answer.json()["response"] == text
        generated = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 12}, "model": model}
        assert httpx.post(f"{served.address}/generate", json=generated, timeout=60).json()["text"] == text
        steps = [{"text": PROMPT}, {"gen": {"name": "x", "max_tokens": 12, "temperature": 0}}]
        program = httpx.post(f"{served.address}/v1/programs", json={"model": model, "program": steps}, timeout=60)
        assert program.json()["variables"]["x"] == text


def test_cached_text_of_one_adapter_is_not_used_for_another(served):
    def cached(model):
        usage = ask(served, model, prompt=PROMPT + " Rome, of course.").json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    shares = [[cached(model) for model in ("base", "one", "two")] for _ in range(2)]
    assert max(shares[0]) < min(shares[1])
    assert len(set(shares[1])) == 1


def test_calls_of_several_adapters_in_one_batch_do_not_change(folders):
    """Beside each other, in a fork, and under a constraint: as alone."""
    with plait.Engine(adapters=folders, deterministic=True) as engine:
        client, greedy = engine.client, sampling_params(temperature=0, max_tokens=16)

        def start(adapter, **constraint):
            session = client.open_session(adapter=adapter)
            session.append(PROMPT)
            return [child.generate(greedy, **constraint) for child in session.fork(2)]

        names = ["", "one", "two", "one", ""]
        alone = {name: start(name)[0].result().token_ids for name in ("", "one", "two")}
        assert len(set(map(tuple, alone.values()))) == 3
        together = [start(name) for name in names]
        for name, calls in zip(names, together, strict=True):
            assert all(call.result().token_ids == alone[name] for call in calls)
        with pytest.raises(plait.InputError, match="did you mean 'one'"):
            client.open_session(adapter="on")


def test_a_fork_may_have_another_adapter(folders):
    """It continues the same text, of which nothing that the parent cached is used."""
    with plait.Engine(adapters=folders, deterministic=True) as engine:
        greedy = sampling_params(temperature=0, max_tokens=16)

        def opened(adapter, text=PROMPT):
            session = engine.client.open_session(adapter=adapter)
            session.append(text)
            return session

        alone = {name: opened(name).generate(greedy).result() for name in ("", "one", "two")}
        parent = opened("one")
        first = parent.generate(greedy)
        children = {name: parent.fork(1, adapter=name)[0] for name in ("", "one", "two")}
        for name, child in children.items():
            child.append(" And")
            continued = child.generate(greedy).result()
            expected = opened(name, PROMPT + first.result().text + " And").generate(greedy).result()
            assert continued.text == expected.text
        siblings = {name: opened("one").fork(2, adapter=name)[1] for name in alone}
        assert all(siblings[name].generate(greedy).result().token_ids == alone[name].token_ids for name in alone)
        with pytest.raises(plait.InputError, match="there is no adapter"):
            parent.fork(1, adapter="three")


@plait.function
def compared(s):
    s += PROMPT
    branches = s.fork(3)
    for branch, name in zip(branches, ["", "one", "two"], strict=True):
        branch += plait.gen("text", max_tokens=12, adapter=name)
    branches.join()
    s += "." + plait.gen("last", max_tokens=12, adapter="two")


def test_a_program_compares_adapters_in_forks(folders):
    with plait.Engine(adapters=folders, deterministic=True) as engine:

        def alone(name, text):
            session = engine.client.open_session(adapter=name)
            session.append(text)
            return session.generate(sampling_params(temperature=0, max_tokens=12)).result().text

        state = compared.run(backend=engine, temperature=0)
        assert state["text"] == [alone(name, PROMPT) for name in ("", "one", "two")]
        assert state["last"] == alone("two", PROMPT + ".")
        with plait.adapter("one"):
            (text,) = plait.function(_one_call).run_batch([{}], backend=engine, temperature=0)
        assert text["x"] == alone("one", PROMPT)
        with plait.adapter("three"), pytest.raises(plait.ProgramError, match="there is no adapter 'three'"):
            plait.function(_one_call).run(backend=engine)


def _one_call(s):
    s += PROMPT + plait.gen("x", max_tokens=12)


def test_no_kind_of_call_uses_what_another_adapter_has_left(folders):
    """The same calls in two orders: one after the other, and all at once in a pool that holds a part of them."""
    choices, colour = [" Rome", " Paris", " the city of Lyon"], Regex("(red|green|dark blue)")

    def start(client, adapter):
        def opened():
            session = client.open_session(adapter=adapter)
            session.append(PROMPT)
            return session

        methods = ("token_length_normalized", "unconditional_likelihood_normalized", "exact")
        calls = [opened().select(choices, method, seed=1) for method in methods]
        for settings in ({"exact": True}, {"particles": 4}):
            calls.append(opened().generate(sampling_params(max_tokens=6, seed=3, **settings), colour))
        return [*calls, *(opened().generate(sampling_params(max_tokens=40, temperature=0)) for _ in range(3))]

    def answers(calls):
        results = [call.result(60) for call in calls]
        values = [result.text if result.choice is None else result.choice.scores for result in results]
        return [*values, *(result.exact.logprob for result in results if result.exact is not None)]

    names = ["", "one", "two"]
    with plait.Engine(adapters=folders, deterministic=True, check_integrity=True) as engine:
        alone = {name: answers(start(engine.client, name)) for name in names}
        first = engine.client.tokenizer.encode([(PROMPT, False)], at_start=True)[:1]
        for name in names:  # without the prompt, but with the adapter
            call = start(engine.client, name)[1]
            unconditional = engine.client.open_session(adapter=name)
            unconditional.append_tokens(first)
            scored = unconditional.score_tokens(call.scored_choices.token_ids[0]).result(60).choice
            assert call.result(60).choice.unconditional_logprobs[0] == scored.token_logprobs[0]
    numbers = {name: [value for value in alone[name] if not isinstance(value, str)] for name in names}
    assert all(len({str(value) for value in same}) == 3 for same in zip(*numbers.values(), strict=True))
    with plait.Engine(adapters=folders, deterministic=True, check_integrity=True, max_pages=200) as engine:
        together = {name: start(engine.client, name) for name in reversed(names)}
        assert {name: answers(calls) for name, calls in together.items()} == alone
        assert engine.client.status().retractions > 0


@pytest.mark.parametrize("options", [["--lora", "one"], ["--lora", "base=x", "--model-name", "base"]])
def test_options_that_name_no_adapter(options, capsys):
    from plait.cli import main

    assert main(["serve", "--port", "0", *options]) != 0
    assert "--lora" in capsys.readouterr().err
