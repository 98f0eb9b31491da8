"""Batches with OpenAI's client: uploads, lines, waiting for the end, results."""

from __future__ import annotations

import json
import time

CHAT = "/v1/chat/completions"


def upload(client, items, name="in.jsonl", **options):
    data = "\n".join(json.dumps(item) for item in items).encode()
    return client.files.create(file=(name, data), purpose="batch", **options)


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "default", **body}}


def create(client, items, url, **options):
    file = upload(client, items)
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **options)


def end_of(client, batch):
    deadline = time.monotonic() + 200  # a busy machine starts a runtime slowly
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client, batch):
    """custom id -> line, of the output file and of the error file."""
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        text = client.files.content(file_id).text if file_id is not None else ""
        found.append({row["custom_id"]: row for row in map(json.loads, text.splitlines())})
    return found
