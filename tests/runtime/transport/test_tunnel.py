"""Tunnels: bytes both ways, ends in both directions, and connections that do not know the secret."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import ipaddress
import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.server.uvicorn_server import loop_factory
from plait.runtime.transport import tunnel
from plait.runtime.transport.tunnel import NONCE_BYTES, SECRET_BYTES, SOCKETS, TunnelClient, TunnelServer

SECRET = bytes(range(SECRET_BYTES))
LOOPS = [asyncio.new_event_loop, loop_factory()]


class Echo:
    """Stands for a runtime: both sockets send back what they get, after their name. ended: connections that ended."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.ended, self.writers, self.servers = directory, 0, [], []

    async def start(self) -> None:
        for name in SOCKETS:
            serve = functools.partial(self.serve, name)
            self.servers.append(await asyncio.start_unix_server(serve, self.directory / name))

    async def serve(self, name, reader, writer) -> None:
        self.writers.append(writer)
        writer.write(name.encode() + b":")
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        self.ended += 1
        writer.close()


@contextlib.asynccontextmanager
async def tunnelled(tmp_path, server_secret=SECRET, client_secret=SECRET, server_tls=None, client_tls=None):
    """Yields the runtime, the tunnel's server and its port, and the client."""
    for name in ("runtime", "here"):
        (tmp_path / name).mkdir()
    runtime = Echo(tmp_path / "runtime")
    await runtime.start()
    server = TunnelServer(lambda: str(tmp_path / "runtime"), server_secret, server_tls)
    port = await server.start("127.0.0.1")
    client = TunnelClient(str(tmp_path / "here"), "127.0.0.1", port, client_secret, client_tls)
    await client.start()
    try:
        yield runtime, server, port, client
    finally:
        await client.close()
        await server.close()


async def opened(client: TunnelClient, name: str):
    return await asyncio.open_unix_connection(str(Path(client.directory) / name))


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SOCKETS), st.binary(min_size=1, max_size=200_000)), min_size=1, max_size=5))
def test_bytes_arrive_as_they_were_sent(tmp_path_factory, messages) -> None:
    async def run() -> None:
        async with tunnelled(tmp_path_factory.mktemp("t")) as (_, _, _, client):

            async def exchange(name, data) -> None:
                reader, writer = await opened(client, name)
                writer.write(data)
                assert await reader.readexactly(len(name) + 1 + len(data)) == name.encode() + b":" + data
                writer.close()

            await asyncio.gather(*(exchange(name, data) for name, data in messages))

    asyncio.run(run())


def test_the_end_of_either_side_ends_the_other(tmp_path) -> None:
    async def run() -> None:
        async with tunnelled(tmp_path) as (runtime, _, _, client):
            reader, writer = await opened(client, "lifeline")
            await reader.readexactly(len("lifeline:"))
            writer.close()
            await until(lambda: runtime.ended == 1)
            reader, writer = await opened(client, "lifeline")
            await reader.readexactly(len("lifeline:"))
            runtime.writers[-1].close()
            async with asyncio.timeout(20):
                assert await reader.read() == b""

    asyncio.run(run())


@pytest.mark.parametrize("side", ["server_secret", "client_secret"])
def test_another_secret_reaches_nothing(tmp_path, side) -> None:
    async def run() -> None:
        async with tunnelled(tmp_path, **{side: bytes(SECRET_BYTES)}) as (runtime, _, _, client):
            reader, _ = await opened(client, "frames")
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            assert not runtime.writers

    asyncio.run(run())


def test_a_connection_without_proof_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tunnel, "PROOF_TIMEOUT_S", 0.3)

    async def run() -> None:
        async with tunnelled(tmp_path) as (runtime, _, port, _):
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, _ in connections:
                await reader.readexactly(NONCE_BYTES)
                async with asyncio.timeout(20):
                    assert await reader.read() == b""
            assert not runtime.writers

    asyncio.run(run())


def test_connections_without_proof_are_limited_and_keep_no_other_one_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tunnel, "PROOF_TIMEOUT_S", 600.0)
    monkeypatch.setattr(tunnel, "MAX_UNPROVEN", 2)

    async def run() -> None:
        async with tunnelled(tmp_path) as (_, server, port, client):
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await asyncio.gather(*(reader.readexactly(NONCE_BYTES) for reader, _ in connections))
            async with asyncio.timeout(20):
                reader, _ = await opened(client, "frames")
                assert await reader.readexactly(len("frames:")) == b"frames:"
                assert await connections[0][0].read() == b""  # the oldest
            await server.close()
            async with asyncio.timeout(20):
                assert await connections[1][0].read() == b""

    asyncio.run(run())


def test_a_client_says_that_one_of_its_connections_was_lost(tmp_path) -> None:
    """Messages may be lost then, though the other connection goes on."""

    async def run() -> None:
        async with tunnelled(tmp_path) as (runtime, _, _, client), asyncio.timeout(20):
            connections = [await opened(client, name) for name in SOCKETS]
            for name, (reader, _) in zip(SOCKETS, connections, strict=True):
                assert await reader.readexactly(len(name) + 1) == f"{name}:".encode()
            assert not client.has_lost_connection
            runtime.writers[0].close()
            await until(lambda: client.has_lost_connection)

    asyncio.run(run())


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_no_tunnel_listens_at_all_addresses(host) -> None:
    server = TunnelServer(lambda: "", SECRET)
    with pytest.raises(ValueError, match="not at all of them"):
        asyncio.run(server.start(host))


def test_a_tls_handshake_has_the_time_of_a_proof(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tunnel, "PROOF_TIMEOUT_S", 0.3)
    files = certificate(tmp_path, "ours")

    async def run() -> None:
        async with tunnelled(tmp_path, server_tls=context(files, ssl.Purpose.CLIENT_AUTH)) as (_, _, port, _):
            reader, _writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(20):
                assert await reader.read() == b""

    asyncio.run(run())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_connection_counts_as_unproven_before_its_tls_handshake(tmp_path, monkeypatch, loop_factory) -> None:
    monkeypatch.setattr(tunnel, "PROOF_TIMEOUT_S", 600.0)
    monkeypatch.setattr(tunnel, "MAX_UNPROVEN", 2)
    files = certificate(tmp_path, "ours")
    tls = {
        "server_tls": context(files, ssl.Purpose.CLIENT_AUTH),
        "client_tls": context(files, ssl.Purpose.SERVER_AUTH),
    }

    async def run() -> None:
        async with tunnelled(tmp_path, **tls) as (_, server, port, client), asyncio.timeout(20):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for reader, _ in silent[:-2]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert len(server._unproven) == 2
            reader, _ = await opened(client, "frames")
            assert await reader.readexactly(len("frames:")) == b"frames:"
            await server.close()
            for reader, _ in silent[-2:]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


def test_with_tls_both_ends_show_a_certificate_of_the_authority(tmp_path) -> None:
    (tmp_path / "tls").mkdir()
    ours, theirs = (certificate(tmp_path / "tls", name) for name in ("ours", "theirs"))

    async def reaches(folder, client_files) -> bool:
        folder.mkdir()
        server_tls, client_tls = (
            context(ours, ssl.Purpose.CLIENT_AUTH),
            context(client_files, ssl.Purpose.SERVER_AUTH, authority=ours),
        )
        async with tunnelled(folder, server_tls=server_tls, client_tls=client_tls) as (_, _, _, client):
            reader, _ = await opened(client, "frames")
            async with asyncio.timeout(20):
                return await reader.read(7) == b"frames:"

    assert asyncio.run(reaches(tmp_path / "1", ours))
    assert not asyncio.run(reaches(tmp_path / "2", theirs))


def context(files, purpose, authority=None) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=(authority or files)[0])
    made.load_cert_chain(*files)
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    return made


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
    builder = builder.not_valid_after(now + datetime.timedelta(1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(files[0]), str(files[1])
