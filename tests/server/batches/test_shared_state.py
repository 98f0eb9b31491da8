"""What threads and the event loop share: files that come and go while others are listed, and batches that wait."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time

import pytest
from batch_services import Service, echo, line

from plait.runtime.server.batches import file_store
from plait.runtime.server.batches.directory import StateDirectory, run_to_end
from plait.runtime.server.batches.file_store import FileStore
from plait.runtime.server.batches.result_log import ResultLine, ResultLog
from plait.runtime.server.errors import ApiError
from plait.runtime.server.settings import server_settings


def open_results(path) -> list[str]:
    found = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [name for name in found if name.startswith(f"{path.resolve()}/") and name.endswith((".output", ".errors"))]


def test_batches_that_wait_hold_no_lines_and_no_open_files(tmp_path) -> None:
    async def main() -> None:
        may_end = asyncio.Event()
        asked = []

        async def ask(path, body, tenant, label, set_calls):
            set_calls(1)
            asked.append(label.partition(":")[0])
            await may_end.wait()
            return await echo(path, body, tenant, label, set_calls)

        async with Service(tmp_path, ask) as service:
            records = [await service.create([line("a"), line("b")])]
            while len(asked) < 2:
                await asyncio.sleep(0.001)
            records += [await service.create([line("a"), line("b")]) for _ in range(4)]
            while any(record.status != "in_progress" for record in records):
                await asyncio.sleep(0.001)
            assert open_results(tmp_path) == []
            assert [record.request_counts.total for record in records] == [2] * 5
            await service.service.cancel("", records[3].id)
            await service.end_of(records[3])
            assert records[3].status == "cancelled" and len(service.results(records[3])) == 2
            os.truncate(service.service.files.content_path(records[4].input_file_id), 3)
            may_end.set()
            for record in records:
                await service.end_of(record)
            assert [record.status for record in records] == ["completed"] * 3 + ["cancelled", "failed"]
            assert records[4].errors.data[0].code == "input_changed"
            assert asked[0::2] == asked[1::2] and set(asked) == {record.id for record in records[:3]}

    asyncio.run(main())


def test_files_that_come_while_others_are_listed(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with Service(tmp_path) as service:
            files = service.service.files
            old = service.upload(b"x\n")
            later = time.time() + 7200
            monkeypatch.setattr(time, "time", lambda: later)
            new = []

            def user_of(file_id):
                new.extend([service.upload(b"y\n")] if not new else [])

            files.user_of = user_of
            await service.service._remove_expired()
            assert not files.has(old) and files.has(new[0])

    asyncio.run(main())


def test_a_file_that_is_being_removed_is_used_by_nothing(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with Service(tmp_path) as service:
            files, file_id = service.service.files, service.upload(b"x\n")
            real, seen = file_store.remove, []

            def remove(path):
                seen.append(files.has(file_id))
                real(path)

            def full(path):
                raise OSError("no")

            monkeypatch.setattr(file_store, "remove", full)
            with pytest.raises(OSError, match="no"):
                await service.service.delete_file("", file_id)
            assert files.get("", file_id).bytes == 2  # it can be deleted later
            monkeypatch.setattr(file_store, "remove", remove)
            await service.service.delete_file("", file_id)
            assert seen == [False, False]
            with pytest.raises(ApiError, match="there is no file"):
                await service.service.delete_file("", file_id)

    asyncio.run(main())


def test_bytes_that_a_full_disk_refused_are_not_counted(tmp_path, monkeypatch) -> None:
    directory = StateDirectory(tmp_path)
    files = FileStore(directory, server_settings())
    log = ResultLog(tmp_path / "o", tmp_path / "e", lambda num_bytes: files.reserve("", num_bytes))
    write = os.write

    def write_to_full_disk(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/e"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_to_full_disk)
    with pytest.raises(OSError, match="space"):
        log.append(
            [ResultLine("1", "a", None, {"code": "x"}), ResultLine("2", "b", {"status_code": 200, "body": {}}, None)]
        )
    assert files._num_bytes[""] == (tmp_path / "o").stat().st_size > 0 and (
        log.counts.completed,
        log.counts.failed,
    ) == (1, 0)
    assert (tmp_path / "e").read_bytes() == b""
    directory.close()


def test_a_line_that_waits_for_its_model_stops_no_other_batch(tmp_path) -> None:
    async def main() -> None:
        is_loaded, asked = asyncio.Event(), []

        async def ask(path, body, tenant, label, set_calls):
            asked.append(tenant)
            if tenant == "waits":
                set_calls(0)  # as `use_model` does
                await is_loaded.wait()
            return await echo(path, body, tenant, label, set_calls)

        keys = {"waits": "0" * 64, "runs": "1" * 64}
        async with Service(tmp_path, ask, max_batch_calls=2, api_keys=keys) as service:
            waiting = await service.create([line(str(number)) for number in range(20)], tenant="waits")
            while not asked:
                await asyncio.sleep(0.001)
            other = await service.create([line("a"), line("b"), line("c")], tenant="runs")
            await service.end_of(other)
            assert other.request_counts.completed == 3 and 1 <= asked.count("waits") <= 2
            is_loaded.set()
            await service.end_of(waiting)
            assert waiting.request_counts.completed == 20 and service.service._slots.num_calls == 0

    asyncio.run(main())


def test_a_descriptor_is_closed_after_the_thread_that_uses_it(tmp_path) -> None:
    """Else the thread could write to another file, which has got the same number."""

    async def main() -> None:
        may_end, events = threading.Event(), []

        def write() -> None:
            may_end.wait(30)
            events.append("written")

        async def store() -> None:
            try:
                await run_to_end(write)
            finally:
                events.append("closed")

        task = asyncio.create_task(store())
        for _ in range(2):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert events == ["written", "closed"]
        assert await run_to_end(max, 1, 2) == 2
        with pytest.raises(ValueError, match="invalid literal"):
            await run_to_end(int, "x")

    asyncio.run(main())
