"""`EngineReplica` without Ray: where it says that its runtime is, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import Welcome
from plait.runtime.server.deployment import engine_replica
from plait.runtime.server.deployment.deploy_config import config_of
from plait.runtime.server.deployment.engine_replica import KV_DEMAND, EngineReplica, ReplicaPlace
from plait.runtime.server.deployment.replica_address import ReplicaAddress, decode_address
from plait.runtime.server.deployment.replica_directory import connect_replica
from plait.runtime.transport import tunnel
from plait.runtime.transport.zmq_client import ZmqClientTransport


@pytest.fixture
def replica(small_model, monkeypatch):
    monkeypatch.setattr(engine_replica, "set_up_log", lambda log_format: None)  # it is for a process of its own
    config = config_of({"model": str(small_model), "context-length": 512, "drain-timeout": 30})
    return EngineReplica(msgspec.json.encode(config), lambda: ReplicaPlace("r1", "node 1", "127.0.0.1"))


def test_an_ingress_of_the_same_machine_gets_the_sockets_and_another_one_a_tunnel(replica) -> None:
    async def run() -> None:
        try:
            assert await replica.address("r2", "node 1") == b""
            here = decode_address(await replica.address("r1", "node 1"))
            assert (here.host, here.port, here.secret) == ("", 0, b"") and replica._tunnel is None
            away = decode_address(await replica.address("r1", "node 2"))
            assert (away.directory, away.host) == ("", "127.0.0.1") and len(away.secret) == 32
            assert decode_address(await replica.address("r1", "node 3")) == away
            for address in (here, away):
                connection = await connect_replica(address, 60.0)
                assert isinstance(connection.welcome, Welcome) and connection.welcome.context_length == 512
                await connection.close()
            with pytest.raises(RuntimeGone):
                await connect_replica(msgspec.structs.replace(away, secret=bytes(32)), 60.0)
        finally:
            await replica.__del__()
        with pytest.raises(RuntimeGone):
            await connect_replica(away, 60.0)

    asyncio.run(run())


def test_a_connection_counts_as_closed_when_one_of_its_two_sockets_is_cut(replica, monkeypatch) -> None:
    """ZeroMQ would connect again, and calls whose replies were lost would wait for ever."""
    ends, join = [], tunnel._join

    async def recording_join(one, other) -> None:
        ends.append(other[1])
        await join(one, other)

    monkeypatch.setattr(tunnel, "_join", recording_join)

    async def run() -> None:
        try:
            connection = await connect_replica(decode_address(await replica.address("r1", "node 2")), 60.0)
            assert not connection.is_closed
            next(end for end in ends if str(end.get_extra_info("peername")).endswith("/frames")).close()
            async with asyncio.timeout(20):
                while not connection.is_closed:
                    await asyncio.sleep(0.01)
            assert not connection.calls.is_closed
            await connection.close()
        finally:
            await replica.__del__()

    asyncio.run(run())


def test_a_connection_that_failed_leaves_no_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeGone):
        asyncio.run(connect_replica(ReplicaAddress("", "127.0.0.1", 1, bytes(32)), 60.0))
    assert not list(tmp_path.iterdir())


def test_an_attempt_at_a_replica_that_does_not_answer_takes_no_thread_of_requests() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            address = ReplicaAddress("", *silent.getsockname(), bytes(32))
            attempt = asyncio.create_task(connect_replica(address, 60.0))
            connection, _ = await loop.sock_accept(silent)  # the attempt is in its thread
            request = asyncio.create_task(asyncio.to_thread(int))
            await asyncio.wait({attempt, request}, return_when=asyncio.FIRST_COMPLETED)
            assert request.done() and not attempt.done()
            connection.close()
        with pytest.raises(RuntimeGone):
            await attempt

    asyncio.run(run())


def test_it_ends_when_the_last_session_has_ended(replica) -> None:
    async def run() -> None:
        assert await replica.record_autoscaling_stats() == {KV_DEMAND: 0.0}
        await replica.check_health()
        client = replica._runtime.client
        session = client.open_session()
        session.append("One, two,")
        assert (await client.astatus()).sessions == 1
        ending = asyncio.create_task(replica.__del__())
        assert replica.__del__() is None
        done, _ = await asyncio.wait({ending}, timeout=1.0)
        assert not done and not client.is_closed
        session.close()
        await asyncio.wait_for(ending, 30)
        assert client.is_closed
        with pytest.raises(RuntimeGone):
            ZmqClientTransport(replica._runtime.address)

    asyncio.run(run())
