"""The how-to pages: each is one screen and runs as printed on the embedded model."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path

import fastapi
import httpx
import pytest
from fastapi.responses import StreamingResponse

import plait

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
SCREEN = 60  # lines


def run_page(page: Path, tmp_path, monkeypatch, runtime):
    """Runs the page's Python blocks as one script, in an empty folder; returns its names."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(script))


@pytest.fixture
def default_runtime(runtime):
    plait.set_default_backend(runtime)
    yield runtime
    plait.set_default_backend(None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_as_printed(page, tmp_path, monkeypatch, default_runtime, capsys):
    assert len(page.read_text().splitlines()) <= SCREEN
    names = run_page(page, tmp_path, monkeypatch, default_runtime)
    if "app" not in names and page.stem != "test":
        assert capsys.readouterr().out.strip()


def test_every_page_is_listed():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text()))
    assert listed == {page.name for page in PAGES}


def test_a_batch_page_continues_its_file(tmp_path, monkeypatch, default_runtime):
    first = run_page(FOLDER / "batch.md", tmp_path, monkeypatch, default_runtime)["states"]
    calls = default_runtime.client.status().prompt_tokens
    second = run_page(FOLDER / "batch.md", tmp_path, monkeypatch, default_runtime)["states"]
    assert [state["short"] for state in second] == [state["short"] for state in first]
    assert default_runtime.client.status().prompt_tokens == calls


def test_the_handlers_answer_and_stream(tmp_path, monkeypatch, default_runtime):
    app = run_page(FOLDER / "serve.md", tmp_path, monkeypatch, default_runtime)["app"]

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page", timeout=120) as client:
            answers = [await client.get(path, params={"topic": "rain"}) for path in ("/haiku", "/haiku/stream")]
        return [answer.text for answer in answers]

    whole, streamed = asyncio.run(ask())
    assert json.loads(whole)["poem"] and streamed


def test_a_client_that_leaves_a_stream_ends_its_generation(default_runtime):
    """The framework's own StreamingResponse, and a client that disconnects after the first piece."""

    @plait.function
    async def endless(s):
        s += "Once" + plait.gen("tale", max_tokens=7000, ignore_eos=True)

    app, client = fastapi.FastAPI(), default_runtime.client
    sampled_before = client.status().sampled_tokens

    @app.get("/tale")
    async def tale():
        return StreamingResponse((await endless.arun(stream=True)).stream("tale"))

    async def ask_and_leave():
        has_begun = asyncio.Event()

        async def receive():
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body"):
                has_begun.set()

        scope = {"type": "http", "method": "GET", "path": "/tale", "query_string": b"", "headers": []}
        await app(scope | {"http_version": "1.1", "scheme": "http", "server": ("page", 80)}, receive, send)
        while client.status().running_calls:  # ends by the test's time limit
            await asyncio.sleep(0.05)

    asyncio.run(ask_and_leave())
    assert client.status().sampled_tokens - sampled_before < 7000
