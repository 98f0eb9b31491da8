"""A `BatchService` without a model: a function answers its lines. And what a batch left on disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.batches.directory import StateDirectory
from plait.runtime.server.batches.line_request import LineAnswer
from plait.runtime.server.batches.records import BatchRecord
from plait.runtime.server.settings import server_settings

URL = "/v1/completions"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id, **body}}


def as_lines(items: list[Any]) -> bytes:
    """JSON lines; bytes among the items are kept as they are."""
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in items)


async def echo(path: str, body: bytes, tenant: str, label: str, set_calls: Any) -> LineAnswer:
    """Answers with the prompt; a body with a status fails with that one."""
    set_calls(1)
    await asyncio.sleep(0)
    request = json.loads(body)
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    status = request.get("status", 200)
    answer = {"text": request["prompt"], "usage": usage} if status == 200 else {"error": {"code": request.get("code")}}
    return LineAnswer(status, f"req-{label}", json.dumps(answer).encode())


class Service:
    """A service on `path`; `service` is the BatchService. Use it inside of a running event loop, and `stop` it."""

    def __init__(self, path: Path, ask: Any = echo, may_start: Any = lambda: True, **settings: Any) -> None:
        self.is_draining = False
        self.directory = StateDirectory(path)
        try:
            self.service = BatchService(
                self.directory,
                server_settings(files_dir=str(path), **settings),
                ask,
                may_start,
                lambda: self.is_draining,
            )
        except BaseException:
            self.directory.close()
            raise

    async def __aenter__(self) -> Service:
        self.service.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.service.stop()

    def upload(self, data: bytes, tenant: str = "") -> str:
        files = self.service.files
        files.reserve(tenant, len(data), 1)
        with files.new_upload() as (file_id, descriptor):
            os.write(descriptor, data)
            return files.add(file_id, tenant, "batch", "in.jsonl", 3600).id

    async def create(self, items: list[Any], tenant: str = "", **options: Any) -> BatchRecord:
        options = {"endpoint": URL, "metadata": None, "model": "m", "results_expire_s": 3600} | options
        return await self.service.create(tenant, self.upload(as_lines(items), tenant), **options)

    async def end_of(self, record: BatchRecord) -> BatchRecord:
        """Waits until the batch has ended."""
        async with asyncio.timeout(60):
            while not record.has_ended or record.id in self.service._runs:
                await asyncio.sleep(0.001)
        return record

    def results(self, record: BatchRecord) -> dict[str, dict[str, Any]]:
        """The lines of both result files by custom id, each of which is there once."""
        lines = []
        for file_id in (record.output_file_id, record.error_file_id):
            if file_id is not None:
                content = self.service.files.content_path(file_id).read_bytes()
                found = [json.loads(text) for text in content.splitlines()]
                for result in found:
                    is_success = (result["response"] or {}).get("status_code") == 200
                    assert is_success == (file_id == record.output_file_id)
                lines += found
        names = Counter(result["custom_id"] for result in lines)
        assert not [name for name, count in names.items() if count > 1]
        return {result["custom_id"]: result for result in lines}
