"""litellm's proxy in front of the server: three protocols asked of it, over three providers, complete and streamed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

ASK = [{"role": "user", "content": "Tell me the capital of France in one short sentence."}]
KEY = "sk-only-on-this-machine-0123456789"
START_S = 120


@pytest.fixture(scope="module")
def proxy(address, tmp_path_factory):
    """Address of the proxy, whose models are named for the provider."""
    bases = {"openai": f"{address}/v1", "hosted_vllm": f"{address}/v1", "anthropic": address}
    models = [
        {"model_name": name, "litellm_params": {"model": f"{name}/default", "api_base": base, "api_key": "none"}}
        for name, base in bases.items()
    ]
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "config.yaml").write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("litellm"), "--config", "config.yaml"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"NO_COLOR": "1"})
    deadline = time.monotonic() + START_S
    while not answers(f"http://127.0.0.1:{port}/health/liveliness"):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
        time.sleep(0.5)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("name", ["openai", "hosted_vllm", "anthropic"])
def test_chat_responses_and_messages(proxy, name) -> None:
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY)
    chat = dict(model=name, messages=ASK, temperature=0, max_tokens=60)
    text = client.chat.completions.create(**chat).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**chat, stream=True)]
    assert "".join(parts) == text and "Paris" in text
    response = client.responses.create(model=name, input=ASK, temperature=0, max_output_tokens=60)
    assert "Paris" in response.output_text
    messages = anthropic.Anthropic(base_url=proxy, api_key=KEY).messages
    fields = dict(model=name, messages=ASK, max_tokens=60, extra_body={"temperature": 0})
    assert "Paris" in messages.create(**fields).content[0].text
    with messages.stream(**fields) as stream:
        assert "Paris" in stream.get_final_text()
