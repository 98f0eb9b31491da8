"""`token_healing` over HTTP: every protocol that has it gives the value of the runtime itself."""

from __future__ import annotations

import json
import urllib.request

import plait
from plait import gen

PROMPT = 'The link is <a href="http:'


def post(address, path, body):
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_all_protocols_heal_alike(real_address):
    asked = {"temperature": 0, "token_healing": True}
    completion = post(
        real_address, "/v1/completions", {"model": "default", "prompt": PROMPT, "max_tokens": 3, "logprobs": 1, **asked}
    )
    sglang = post(real_address, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 3, **asked}})
    program = post(
        real_address,
        "/v1/programs",
        {"program": [{"text": PROMPT}, {"gen": {"name": "url", "max_tokens": 3, **asked}}]},
    )
    text = completion["choices"][0]["text"]
    assert text.startswith("//")
    assert "".join(completion["choices"][0]["logprobs"]["tokens"]) == text
    assert sglang["text"] == text
    assert program["variables"]["url"] == text

    @plait.function
    def link(s):
        s += PROMPT + gen("url", max_tokens=3, token_healing=True)

    endpoint = plait.RuntimeEndpoint(real_address)
    assert link.run(backend=endpoint, temperature=0)["url"] == text
    endpoint.close()
