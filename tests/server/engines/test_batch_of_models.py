"""A batch whose lines name two models, on a server with room for one: each is loaded once."""

from __future__ import annotations

import json

from served_models import GREEDY, Models
from waiting import wait_until

URL = "/v1/completions"


def test_lines_are_grouped_by_model(folder, tmp_path) -> None:
    models = "one: {model: tiny.gguf, kv-memory-gb: 0.05}\ntwo: {model: tiny.gguf, kv-memory-gb: 0.05}\n"
    served = Models(folder, models, "--keep", 1, "--files-dir", tmp_path / "state", "--log-format", "text")
    try:
        items = [
            {"custom_id": f"{name} {n}", "method": "POST", "url": URL, "body": {"model": name, "prompt": "a", **GREEDY}}
            for n in range(6)
            for name in ("one", "two")
        ]
        data = "\n".join(map(json.dumps, [*items, {**items[0], "custom_id": "x", "body": {"model": "x"}}])).encode()
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in", data)}}
        file_id = served.http.post("/v1/files", **form).json()["id"]
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        batch = served.http.post("/v1/batches", json=body).json()
        url = f"/v1/batches/{batch['id']}"
        assert wait_until(lambda: served.http.get(url).json()["status"] == "completed")
        batch = served.http.get(url).json()
        assert batch["request_counts"] == {"total": 13, "completed": 12, "failed": 1}
        answers = served.http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        found = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, answers)}
        assert all(model == name.split()[0] for name, model in found.items()) and len(found) == 12
        starts = [line for line in served.lines if "is started" in line and "the model" in line]
        assert len(starts) == 2, served.lines
        assert served.end() == 0
    finally:
        served.close()
