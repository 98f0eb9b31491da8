"""A server is killed before each write of a batch, and in the middle of it: the next one completes the batch.

A kill is simulated: the operation does nothing, or a part of its work, and so does every operation after it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
from batch_services import Service, as_lines, echo, line
from killed_os import Killed, KilledOs

from plait.runtime.results import result_file
from plait.runtime.server.batches import batch_service, directory, file_store, result_log

ITEMS = [line("a"), line("b", status=400), line("c"), line("slow"), line("d")]
MODULES = (directory, file_store, result_file)


async def ask(path, body, tenant, label, set_calls):
    if b"slow" in body:
        set_calls(1)
        await asyncio.sleep(3600)
    return await echo(path, body, tenant, label, set_calls)


@pytest.fixture
def start(tmp_path):
    """A directory with an uploaded file, which each kill begins with."""

    async def main() -> str:
        async with Service(tmp_path / "start") as service:
            return service.upload(as_lines(ITEMS))

    return tmp_path / "start", asyncio.run(main())


async def run_until_killed(path, file_id: str, fake: KilledOs) -> str | None:
    """Runs a batch that is cancelled in the end, until the kill. Returns its id if the client has got it."""
    batch_id, service = None, Service(path, ask, max_batch_calls=2)
    try:
        service.service.start()
        record = await service.service.create("", file_id, "/v1/completions", {"k": "v"}, "m", 3600)
        batch_id = record.id
        while record.request_counts.completed + record.request_counts.failed < 4 and fake.num_left > 0:
            await asyncio.sleep(0)
        if fake.num_left > 0:
            await service.service.cancel("", batch_id)
        while not record.has_ended and fake.num_left > 0:
            await asyncio.sleep(0)
    except Killed:
        pass
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        service.directory.close()
    return batch_id


async def complete(path, batch_id: str | None) -> None:
    """Continues on the same directory with a server that ends every line, and checks what the client then finds."""
    async with Service(path) as service:
        files = service.service.files
        records = service.service.of_tenant("")
        assert batch_id is None or [record.id for record in records] == [batch_id], "the batch is lost"
        for record in records:
            await service.end_of(record)
            results = service.results(record)
            assert record.status in ("completed", "cancelled") and record.metadata == {"k": "v"}
            assert set(results) == {item["custom_id"] for item in ITEMS}
            counts = record.request_counts
            assert (counts.total, counts.completed + counts.failed) == (5, 5)
            is_cancelled = results["slow"]["error"] is not None
            assert is_cancelled == (record.status == "cancelled")
            assert counts.failed == 1 + is_cancelled
            assert record.usage.output_tokens == 2 * counts.completed
        stored = files.of_tenant("")
        assert len(stored) == 1 + 2 * len(records)
        assert files._num_bytes[""] == sum(file.bytes for file in stored) and files._num_files[""] == len(stored)
        names = {path.stem for path in (path / "files").iterdir()}
        assert names == {file.id for file in stored}, "files are left over"
        assert {path.name for path in (path / "batches").iterdir()} <= {f"{record.id}.json" for record in records}


def test_a_kill_at_any_moment_loses_nothing_and_repeats_nothing(tmp_path, start, monkeypatch) -> None:
    source, file_id = start
    monkeypatch.setattr(batch_service, "HOUSEKEEPING_S", 3600)

    def run(number: int, num_operations: int) -> int:
        """Runs with a kill at the n-th operation, then completes. Returns how many operations there were."""
        path = tmp_path / str(number)
        shutil.copytree(source, path)
        fake = KilledOs(num_operations)
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "os", fake)
            batch_id = asyncio.run(run_until_killed(path, file_id, fake))
        asyncio.run(complete(path, batch_id))
        shutil.rmtree(path)
        return fake.num_done

    total = run(0, 1_000_000)
    assert total > 30
    for number in range(1, total + 1):
        run(number, number)


def test_a_killed_upload_leaves_nothing(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        service = Service(tmp_path)
        (tmp_path / "files" / ".file-1.json.0.part").write_bytes(b"abc")
        (tmp_path / "files" / "file-2.content").write_bytes(b"abc")
        (tmp_path / "files" / "file-3.part").write_bytes(b"abc")
        service.service.start()
        assert not [*(tmp_path / "files").iterdir()]
        await service.service.stop()

    asyncio.run(main())


def test_the_kill_is_seen_by_the_test(tmp_path, start, monkeypatch) -> None:
    """Without the check of the last line, a torn line would be found as damage."""
    log = SimpleNamespace(output=tmp_path / "o", errors=tmp_path / "e")
    log.output.write_bytes(json.dumps({"custom_id": "a", "response": None}).encode() + b"\n" + b'{"id":"7","cus')
    results = result_log.ResultLog(log.output, log.errors, lambda num_bytes: None)
    assert results.done == {result_log.digest("a")} and log.output.read_bytes().endswith(b"}\n")
