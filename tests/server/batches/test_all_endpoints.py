"""Lines of every endpoint over a scripted scheduler: they are answered, and their sessions are in the background."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

import httpx
import pytest
from scripted_server import ScriptedServer

from plait.runtime.messages import Open
from plait.runtime.server.batches.records import Endpoint

ASK = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": ASK, "n": 2, "priority": 5},
    "/v1/completions": {"prompt": ["a", "b"], "priority": 5},
    "/v1/embeddings": {"input": ["a", "b"], "priority": 5},
    "/v1/responses": {"input": "hi", "priority": 5},
}


def test_every_endpoint_is_tried() -> None:
    assert set(BODIES) == set(get_args(Endpoint))


@pytest.mark.parametrize("url", BODIES)
def test_lines_run_in_the_background_and_requests_do_not(tmp_path, url) -> None:
    server = ScriptedServer(files_dir=str(tmp_path))
    server.scheduler.answer = lambda prompt, request: "Some text."
    body = {"model": "default", **BODIES[url]}
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}

    async def main() -> tuple[httpx.Response, dict]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            direct = await http.post(url, json=body)
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in", json.dumps(line).encode())}}
            file_id = (await http.post("/v1/files", **form)).json()["id"]
            created = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=created)).json()
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.01)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
            answer = await http.get(f"/v1/files/{batch['output_file_id']}/content")
            await server.app.state.plait.batches.stop()
            return direct, answer.json()

    direct, answer = asyncio.run(main())
    assert direct.status_code == 200
    body = answer["response"]["body"]
    assert set(body) == set(direct.json()) and body["usage"] == direct.json()["usage"]
    opened = server.scheduler.sent(Open)
    half = len(opened) // 2
    assert half >= 1 and [session.background for session in opened] == [False] * half + [True] * half
    assert {session.priority for session in opened} == {5}, "the order among the lines of batches"
