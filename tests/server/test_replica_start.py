"""Starting replicas: other model files, a device that cannot be used, and wrong numbers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import psutil
import pytest
from served_process import Served
from tiny_llama_gguf import write_small_model
from waiting import wait_until

from plait.cli import main
from plait.runtime.cluster.replicated_client import ReplicatedClient
from plait.runtime.errors import InputError, ModelError
from plait.runtime.model_files.fingerprint import model_fingerprint
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.engines import replicated_runtime, restarting_runtime
from plait.runtime.server.engines.replicated_runtime import ReplicatedRuntime, replica_devices
from plait.runtime.server.engines.start import checked_devices, num_ranks


def workers() -> set[int]:
    """The runtime processes of this process."""
    children = psutil.Process().children()
    return {child.pid for child in children if any("process.worker" in part for part in child.cmdline())}


def answer(runtime) -> str:
    session = runtime.client.open_session()
    session.append("One, two,")
    text = session.generate(sampling_params(max_tokens=4, temperature=0.0)).result(60).text
    session.close()
    return text


def test_replica_with_other_model_files_is_refused(small_model, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(restarting_runtime, "INITIAL_BACKOFF_S", 0.05)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path, other = tmp_path / "model.gguf", write_small_model(tmp_path / "other.gguf", context=4096)
    shutil.copy(small_model, path)
    runtime = ReplicatedRuntime(str(path), ["cpu", "cpu"], progress=False, max_pages=2000)
    try:
        expected = answer(runtime)
        os.replace(other, path)
        os.kill(runtime.replicas[1].client.model.server_pid, signal.SIGKILL)
        assert wait_until(lambda: "replica 1 has other model files" in caplog.text, 100)
        assert [answer(runtime) for _ in range(4)] == [expected] * 4
        assert runtime._transport.load(1) is None and runtime.replicas[1].num_restarts == 0
        shutil.copy(small_model, tmp_path / "again.gguf")  # of another time
        os.replace(tmp_path / "again.gguf", path)
        assert wait_until(lambda: runtime._transport.load(1) is not None, 100)
        assert [answer(runtime) for _ in range(4)] == [expected] * 4
        assert runtime._transport.num_placed[1] > 0
    finally:
        runtime.shutdown()


def test_replica_with_other_adapters_is_refused() -> None:
    """As after a restart, when the adapter's folder holds another one."""
    runtime = ReplicatedRuntime.__new__(ReplicatedRuntime)
    runtime._lock, runtime._num_replicas, runtime._stuck_after_s = threading.Lock(), 2, 1.0
    first = SimpleNamespace(model_fingerprint="f", vocab_size=9, adapters={"sql": "00"})
    runtime._transport = SimpleNamespace(welcome=first)
    other = SimpleNamespace(model_fingerprint="f", vocab_size=9, adapters={"sql": "01"})
    with pytest.raises(ModelError, match="replica 1 has other adapters"):
        runtime._connect(1, SimpleNamespace(client=SimpleNamespace(model=other)))


def test_replica_that_cannot_start_ends_the_others(small_model) -> None:
    before = workers()
    with pytest.raises(InputError, match="nowhere"):
        ReplicatedRuntime(str(small_model), ["cpu", "nowhere"], progress=False, max_pages=2000)
    assert workers() == before


@pytest.mark.usefixtures("default_signals")
def test_sigterm_lets_requests_end_and_ends_all_replicas(small_model) -> None:
    served = Served(small_model, "--replicas", "2", environment={"OMP_NUM_THREADS": "1"})
    try:
        replicas = psutil.Process(served.process.pid).children()
        assert len(replicas) == 2
        for replica in replicas:
            replica.suspend()  # so that the request still runs when SIGTERM arrives
        answers = []
        body = {"model": "default", "prompt": "One, two,", "max_tokens": 4}
        asking = threading.Thread(target=lambda: answers.append(served.post(body)))
        asking.start()
        assert wait_until(lambda: served.get("/status").json()["in_flight"] == 1)
        served.process.terminate()
        assert wait_until(lambda: served.get("/ready").json().get("error", {}).get("code") == "draining")
        for replica in replicas:
            replica.resume()
        asking.join(60)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 4
        assert served.wait() == 0 and not any(replica.is_running() for replica in replicas)
    finally:
        served.close()


def test_fingerprint_tells_contents_apart_and_no_places(small_model, tmp_path) -> None:
    path, expected = tmp_path / "copy.gguf", model_fingerprint(small_model)
    shutil.copy(small_model, path)
    assert model_fingerprint(path) == expected
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert model_fingerprint(path) != expected
    path.write_bytes(data + b"\0")
    assert model_fingerprint(path) != expected
    folder = tmp_path / "folder"
    folder.mkdir()
    fingerprints = [model_fingerprint(folder)]
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (folder / name).write_text("{}")
        fingerprints.append(model_fingerprint(folder))
    assert len(set(fingerprints)) == 3 and fingerprints[2] == fingerprints[3]


def test_devices_of_replicas(monkeypatch) -> None:
    assert replica_devices(2, "cuda:0, cpu") == ["cuda:0", "cpu"]
    assert replica_devices(3, "cpu") == ["cpu"] * 3
    with pytest.raises(InputError, match="names 2 devices for 3 replicas"):
        replica_devices(3, "cpu,cpu")
    for num_gpus, num_replicas, devices in ((0, 2, ["auto"] * 2), (2, 1, ["auto"]), (2, 2, ["cuda:0", "cuda:1"])):
        monkeypatch.setattr(replicated_runtime, "num_gpu_nodes", lambda num_gpus=num_gpus: num_gpus)
        assert replica_devices(num_replicas, None) == devices
    with pytest.raises(InputError, match="3 replicas need as many GPUs, and this machine has 2"):
        replica_devices(3, None)


def test_every_replica_has_as_many_gpus_as_ranks(monkeypatch) -> None:
    monkeypatch.setattr(replicated_runtime, "num_gpu_nodes", lambda: 8)
    ranks = num_ranks({"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    assert checked_devices(2, None, ranks) == ["cuda:0", "cuda:4"]
    assert num_ranks({"tensor_parallel_size": None}) == 1
    with pytest.raises(InputError, match="12 replicas need as many GPUs"):
        checked_devices(3, None, ranks)


@pytest.mark.parametrize("number", ["0", "65"])
def test_wrong_number_of_replicas(number, capsys) -> None:
    assert main(["serve", "--port", "0", "--replicas", number]) == 1
    assert f"--replicas takes a number from 1 to 64, not {number}" in capsys.readouterr().err


def test_adapters_of_replicas_do_not_change() -> None:
    client = ReplicatedClient.__new__(ReplicatedClient)
    for change in (client.load_adapter("a", "/a"), client.unload_adapter("a")):
        with pytest.raises(InputError, match="that they started with"):
            asyncio.run(change)
