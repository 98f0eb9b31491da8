"""`plait serve` with a log that nobody reads, and with one that is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from prometheus_scrape import scrape
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("default_signals")
LONG_PATH = "/" + "%01" * 199  # JSON escapes each character in six bytes: its requests have long lines
BATCH = 100


@pytest.fixture
def server(small_model):
    """A server process whose standard error is a pipe: the process, an HTTP client, and the pipe's read end."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", "-m", "plait.cli", "serve", str(small_model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write_end, text=True)
    os.close(write_end)
    address = process.stdout.readline().split()[-1]
    with httpx.Client(base_url=address, timeout=60) as client, os.fdopen(read_end, "rb") as log:
        yield process, client, log
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_log_that_nobody_reads_does_not_stop_the_server_and_one_that_is_read_has_every_line(server) -> None:
    process, client, log = server
    num_requests = fill(client)
    assert client.get("/health").status_code == 200
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(log))
    reader.start()
    assert wait_until(lambda: any(b"were dropped" in line for line in lines))
    num_dropped = int(dropped_lines(client))
    for _ in range(2 * BATCH):
        client.get(LONG_PATH)
    assert int(dropped_lines(client)) == num_dropped
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    reader.join(60)
    messages = [json.loads(line) for line in lines]
    reports = [line["message"] for line in messages if "dropped" in line.get("message", "")]
    assert sum(int(report.split()[0]) for report in reports) == num_dropped
    assert sum(line.get("route") == "other" for line in messages) == num_requests + 2 * BATCH - num_dropped
    assert messages[-1]["message"].startswith("shutting down")


def test_a_server_whose_log_nobody_reads_ends(server) -> None:
    process, client, _ = server
    fill(client)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def fill(client: httpx.Client) -> int:
    """Asks until lines are dropped. Returns the number of requests."""
    num_requests = 0
    while not dropped_lines(client):
        for _ in range(BATCH):
            assert client.get(LONG_PATH).status_code == 404
        num_requests += BATCH
        assert num_requests <= 20_000
    return num_requests


def dropped_lines(client: httpx.Client) -> float:
    return scrape(str(client.base_url).rstrip("/"))["plait_log_lines_dropped_total",]
