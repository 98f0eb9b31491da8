"""`plait serve` with a batch: killed once, shut down once, and started again on the same directory."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter

import httpx
import pytest
from served_process import Served
from waiting import wait_until

from plait.runtime.server.batches import line_runner

pytestmark = pytest.mark.usefixtures("default_signals")
NUM_LINES = 60


def start(model, directory, *options) -> Served:
    return Served(model, "--files-dir", directory, "--max-batch-calls", "2", "--drain-timeout", "1", *options)


def create(address) -> str:
    body = {"model": "default", "prompt": "One, two,", "max_tokens": 40, "ignore_eos": True}
    items = [
        {"custom_id": f"line {n}", "method": "POST", "url": "/v1/completions", "body": body | {"seed": n}}
        for n in range(NUM_LINES)
    ]
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in", "\n".join(map(json.dumps, items)).encode())}}
    file_id = httpx.post(f"{address}/v1/files", **form, timeout=60).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return httpx.post(f"{address}/v1/batches", json=body, timeout=60).json()["id"]


def test_a_batch_survives_a_kill_and_a_shutdown(small_model, tmp_path) -> None:
    directory = tmp_path / "state"
    server = start(small_model, directory)
    try:
        batch_id = create(server.address)
        for part, sent in ((0.1, signal.SIGKILL), (0.3, signal.SIGTERM)):

            def completed(server=server) -> int:
                return server.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"]

            assert wait_until(lambda: completed() >= part * NUM_LINES)  # noqa: B023
            before = completed()
            server.process.send_signal(sent)
            assert server.wait() == (0 if sent == signal.SIGTERM else -signal.SIGKILL)
            server.close()
            assert before < NUM_LINES, "it was still running"
            server = start(small_model, directory)
        assert wait_until(lambda: server.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = server.get(f"/v1/batches/{batch_id}").json()
        lines = server.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    finally:
        server.close()
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    found = Counter(json.loads(line)["custom_id"] for line in lines)
    assert found == Counter(f"line {n}" for n in range(NUM_LINES)), "nothing is lost, and nothing is there twice"


def test_a_second_server_on_the_directory_is_refused(tmp_path, capsys) -> None:
    from plait.cli import main
    from plait.runtime.server.batches.directory import StateDirectory

    directory = StateDirectory(tmp_path)
    assert main(["serve", "--port", "0", "--files-dir", str(tmp_path)]) == 1
    assert "another server uses it" in capsys.readouterr().err
    directory.close()
    (tmp_path / "file").write_text("x")
    assert main(["serve", "--port", "0", "--files-dir", str(tmp_path / "file")]) == 1
    assert "--files-dir" in capsys.readouterr().err
    assert main(["serve", "--max-file-bytes", "1"]) == 1
    assert "--max-file-bytes must be" in capsys.readouterr().err


def test_lines_wait_for_the_next_server_when_the_runtime_is_not_restarted(small_model, tmp_path) -> None:
    server = start(small_model, tmp_path / "state", "--max-restarts", "0")
    try:
        batch_id = create(server.address)

        def counts() -> dict[str, int]:
            return server.get(f"/v1/batches/{batch_id}").json()["request_counts"]

        assert wait_until(lambda: counts()["completed"] > 2)
        server.runtime().kill()
        assert wait_until(lambda: server.get("/health").status_code == 503)
        before = counts()
        time.sleep(4 * line_runner.FIRST_PAUSE_S)  # lines that were repeated would have failed
        assert counts() == before and before["completed"] < NUM_LINES and before["failed"] == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        server.close()
        server = start(small_model, tmp_path / "state")
        assert wait_until(lambda: server.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        assert counts() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    finally:
        server.close()
