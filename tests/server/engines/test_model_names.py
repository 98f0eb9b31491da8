"""Aliases: one engine under several names, in every protocol; wrong ones are refused at the start."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from plait.cli import main
from plait.runtime.errors import InputError
from plait.runtime.server import serve as server
from plait.runtime.server.engines.model_names import alias_options, resolve_aliases
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.http.call_queue import CallQueue
from plait.runtime.server.settings import server_settings

TURN = [{"role": "user", "content": "hi"}]
REQUESTS = {
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": TURN, "max_tokens": 1},
    "/v1/programs": {"program": [{"text": "hi"}, {"gen": {"max_tokens": 1}}]},
    "/api/chat": {"messages": TURN, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 1}, "stream": False},
}
NAMES = ("claude-sonnet", "gpt-4o", "default")


@pytest.fixture
def http(serve):
    address, _ = serve(aliases=("claude-sonnet", "gpt-4o"), model_name="smol")
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def test_answers_have_the_name_that_was_asked_for(http) -> None:
    for path, body in REQUESTS.items():
        for name in NAMES:
            answer = http.post(path, json=body | {"model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name), (path, answer.text)
    stream = http.post(
        "/v1/chat/completions", json=REQUESTS["/v1/chat/completions"] | {"model": "gpt-4o", "stream": True}
    )
    assert stream.text.count('"model":"gpt-4o"') == stream.text.count('"object"') > 1
    assert http.post("/v1/completions", json=REQUESTS["/v1/completions"] | {"model": "gpt-4"}).status_code == 404


def test_all_names_share_one_cache(http) -> None:
    prompt = "Names of one engine share its prefix cache, whatever they are. " * 4
    cached = [
        http.post("/v1/completions", json={"model": name, "prompt": prompt, "max_tokens": 1}).json()["usage"]
        for name in NAMES
    ]
    assert cached[1] == cached[2]
    assert cached[1]["prompt_tokens_details"]["cached_tokens"] == cached[1]["prompt_tokens"] - 1


def test_aliases_are_listed(http) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in models] == [
        ("smol", "smol"), ("claude-sonnet", "smol"), ("gpt-4o", "smol")
    ]  # fmt: skip
    tags = http.get("/api/tags").json()["models"]
    assert [model["name"] for model in tags] == ["smol:latest", "claude-sonnet:latest", "gpt-4o:latest"]
    assert len({model["digest"] for model in tags}) == 1
    one = http.get("/v1/models/gpt-4o").json()
    assert (one["id"], one["root"], one["max_model_len"]) == ("gpt-4o", "smol", models[0]["max_model_len"])
    assert http.post("/api/show", json={"model": "gpt-4o:latest"}).json()["details"]["family"] == "llama"
    assert "served are smol, claude-sonnet, gpt-4o" in http.get("/v1/models/other").json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a"], "--alias 'a' names no model; write NAME=MODEL"),
        (["a="], "names no model"),
        (["=small"], "cannot be a model's name"),
        (["default=small"], "is not 'default'"),
        (["a:latest=small"], "does not end with ':latest'"),
        (["a=smal"], r"there is no model 'smal' \(did you mean 'small'\?\)"),
        (["small=large"], "the name 'small' is taken by a model"),
        (["a=small", "a=large"], "the name 'a' is taken by an alias"),
        (["a=a"], "the alias 'a' leads to the alias 'a' again"),
        (["a=b", "b=c", "c=b"], "the alias 'a' leads to the alias 'b' again"),
        ([f"a{number}=small" for number in range(257)], "257 aliases; 256 are allowed"),
    ],
)
def test_wrong_aliases_are_refused(options, message) -> None:
    with pytest.raises(InputError, match=message):
        resolve_aliases(alias_options(options), ["small", "large"])


def test_the_options_of_the_command(monkeypatch, capsys) -> None:
    served = []
    monkeypatch.setattr(server, "serve", lambda model, settings, *rest, **engine: served.append(settings) or 0)
    assert main(["serve", "--model-name", "m", "--alias", "b=m", "--alias=c=default"]) == 0
    assert served.pop().aliases == ("b", "c")
    assert main(["serve", "--alias", "b=default"]) == 0 and served.pop().aliases == ("b",)
    assert (
        main(["serve", "--model-name", "a,b,c"]) == 1 and "for further ones add --alias b=a" in capsys.readouterr().err
    )
    assert main(["serve", "--model-name", "m", "--alias", "b=other"]) == 1
    assert "--alias b=other: there is no model 'other'" in capsys.readouterr().err


def test_a_name_of_the_model_never_means_an_adapter() -> None:
    """Whatever a backend calls its adapters, which `plait serve` checks only for its own."""
    client = SimpleNamespace(model=SimpleNamespace(adapters=dict.fromkeys(("base", "gpt", "default", "sql"), "00")))
    settings = server_settings(model_name="base", aliases=("gpt",))
    model = ServedModel(settings, CallQueue(settings), SimpleNamespace(client=client))
    assert model.names == ("base", "gpt", "default", "sql")
    assert {model.adapter_of(name) for name in (None, "base", "gpt", "default", "other")} == {""}
    assert model.adapter_of("sql") == "sql"
