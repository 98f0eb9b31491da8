"""`plait deploy` on a Ray of this machine: the embedded model on one or two replicas, faults, and autoscaling.

One Ray and one deployment for the whole file; the tests run in order and leave a replica that answers. Faults of the
runtimes themselves are in tests/server/deployment/, without Ray.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from plait.runtime.errors import InputError
from plait.runtime.server.deployment.control import LOCAL, connected, delete, deploy, describe
from plait.runtime.server.deployment.deploy_config import DeployConfig, config_of

LIMIT_S = 60.0
TEXT = "The harbour master counted the boats twice each evening. " * 20
SETTINGS: dict[str, Any] = {
    "min-replicas": 1,
    "max-replicas": 2,
    "target-kv-share": 0.4,
    "upscale-delay": 0,
    "downscale-delay": 1,
    "cpus": 0.2,
    "ingress-cpus": 0.2,
    "kv-memory-gb": 0.06,
    "context-length": 1024,
    "max-queue-time": 0,
    "drain-timeout": 30,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployed:
    """The deployment: requests to it, and the processes of its replicas."""

    def __init__(self, config: DeployConfig, url: str) -> None:
        self.config, self.url = config, url
        self.refusal_of_taken_port = ""
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)

    def complete(self, prompt: str = TEXT, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=request_of(prompt, **fields))

    def events(self, request: dict[str, Any]) -> Iterator[str]:
        with self.http.stream("POST", "/v1/completions", json=request) as response:
            yield from (line.removeprefix("data: ") for line in response.iter_lines() if line)

    def status(self) -> dict[str, Any]:
        return self.http.get("/status").json()

    def metric(self, name: str) -> dict[str, float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
        return {line.partition("{")[2].partition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def processes(self, deployment: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"ServeReplica:plait:{deployment}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_until_ready(self, num_replicas: int = 1) -> None:
        def is_ready() -> bool:
            replicas = self.status()["replicas"]
            return len(replicas) == num_replicas and all(replica["state"] == "ready" for replica in replicas)

        wait_for(is_ready)


def request_of(prompt: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            if condition():
                return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    config = config_of(SETTINGS | {"port": free_port()})
    with connected(LOCAL):
        refusal = error_of_taken_port()
        url = deploy(config, LIMIT_S * 2, lambda state: None)
        service = Deployed(config, url)
        service.refusal_of_taken_port = refusal
        service.wait_until_ready()
        yield service
        delete(config.name)


def error_of_taken_port() -> str:
    """What `deploy` says about a port that another process listens at; nothing has been started then."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError) as caught:
            deploy(config_of({"port": taken.getsockname()[1]}), 5, lambda state: None)
    return str(caught.value)


def run_side_by_side(works: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


def test_requests_are_answered_and_counted(deployed):
    first = deployed.complete().json()
    again = deployed.complete().json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 190
    assert [replica["placed"] for replica in deployed.status()["replicas"]] == [2]
    wait_for(lambda: deployed.metric("plait_prompt_tokens_total").get('replica="0"', 0) >= 2 * 190)
    assert sum(deployed.metric("plait_router_load_tokens").values()) == 0


def test_only_the_address_of_the_file_is_listened_at(deployed):
    """Ray Serve has no proxies, and the replicas of one machine no TCP ports of their own."""
    (ingress,) = deployed.processes("ingress")
    listening = {tuple(c.laddr) for c in ingress.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", deployed.config.server.port) in listening
    runtimes = [child for engine in deployed.processes("engine") for child in engine.children()]
    assert runtimes and not any(runtime.net_connections("tcp") for runtime in runtimes)
    assert not [process for process in psutil.Process().children(recursive=True) if "ProxyActor" in process.name()]


def test_the_calls_of_a_client_that_left_are_ended(deployed):
    with (
        contextlib.suppress(httpx.TimeoutException),
        httpx.Client(base_url=deployed.url, timeout=0.5) as impatient,
    ):
        impatient.post("/v1/completions", json=request_of(max_tokens=900, n=4))
        pytest.fail("900 tokens came in half a second")
    wait_for(lambda: deployed.status()["runtime"]["running_calls"] == 0 and deployed.status()["in_flight"] == 0)
    assert deployed.status()["runtime"]["used_pages"] == 0


def test_replicas_follow_the_load_one_is_killed_and_no_request_is_lost(deployed):
    """A stream that began on the killed replica gets its error; all other requests get their answer."""
    answers: list[httpx.Response] = []
    enough = threading.Event()

    def keep_asking(index: int) -> None:
        while not enough.is_set():
            answers.append(deployed.complete(f"Load {index}. {TEXT}", max_tokens=200))

    threads = [threading.Thread(target=keep_asking, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: [replica["state"] for replica in deployed.status()["replicas"]] == ["ready"] * 2)
        wait_for(lambda: all(replica["load"] > 0 for replica in deployed.status()["replicas"]))
        requests = [request_of(f"Stream {index}. {TEXT}", max_tokens=500, stream=True) for index in range(4)]
        streams = [deployed.events(request) for request in requests]
        for stream in streams:
            next(stream)
        before = {process.pid for process in deployed.processes("engine")}
        deployed.processes("engine")[0].kill()
        for events in run_side_by_side([lambda s=stream: list(s) for stream in streams]):
            assert events[-1] == "[DONE]" or json.loads(events[-1])["error"]["code"] == "runtime_gone"
        wait_for(lambda: {process.pid for process in deployed.processes("engine")} - before)
        wait_for(lambda: [replica["state"] for replica in deployed.status()["replicas"]] == ["ready"] * 2)
    finally:
        enough.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {200}


def test_the_ingress_is_restarted_and_finds_the_replicas_again(deployed):
    text = deployed.complete().json()["choices"][0]["text"]
    (ingress,) = deployed.processes("ingress")
    ingress.kill()
    wait_for(lambda: deployed.complete().status_code == 200)
    deployed.wait_until_ready()  # the second one of the last test has left
    again = [deployed.complete().json() for _ in range(2)]
    assert [answer["choices"][0]["text"] for answer in again] == [text] * 2
    assert again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 190  # it asked what the replicas have


def test_a_port_that_is_taken_is_an_error_before_anything_starts(deployed):
    assert deployed.refusal_of_taken_port.startswith("cannot listen at 127.0.0.1 port ")
    assert deployed.refusal_of_taken_port.endswith(": Address already in use")


def test_a_deployment_describes_itself_and_refuses_the_address_of_another_machine(deployed):
    state = describe(deployed.config.name)
    assert state is not None and state.status == "RUNNING" and state.replicas["engine"]["RUNNING"] == 1
    assert describe("another") is None
    with pytest.raises(
        InputError, match=r"no machine of the cluster has the address 192\.0\.2\.1; they have 127\.0\.0\.1"
    ):
        deploy(config_of(SETTINGS | {"host": "192.0.2.1"}), 5, lambda state: None)
