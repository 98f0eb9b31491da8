"""The states of a batch, from its input to its result files, with a function in place of the endpoints."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import pytest
from batch_services import Service, as_lines, echo, line

from plait.runtime.errors import InputError
from plait.runtime.results import result_file
from plait.runtime.server.batches import batch_run, batch_service, file_store, line_runner
from plait.runtime.server.batches.file_store import QuotaExceeded
from plait.runtime.server.errors import ApiError


def codes(record):
    return [(problem.line, problem.code, problem.param) for problem in (record.errors.data if record.errors else [])]


async def run_one(path, items, ask=echo, **settings):
    async with Service(path, ask, **settings) as service:
        record = await service.end_of(await service.create(items))
        return record, service.results(record)


def test_answers_and_errors_have_their_files(tmp_path) -> None:
    items = [line("a"), line("b", status=400, code="x"), line("c")]
    record, results = asyncio.run(run_one(tmp_path, items))
    assert record.status == "completed" and record.completed_at >= record.finalizing_at >= record.in_progress_at
    assert (record.request_counts.total, record.request_counts.completed, record.request_counts.failed) == (3, 2, 1)
    assert (record.usage.input_tokens, record.usage.input_tokens_details.cached_tokens, record.usage.output_tokens) == (
        6,
        2,
        4,
    )
    assert results["a"]["response"]["body"]["text"] == "a" and results["a"]["error"] is None
    assert results["b"]["response"]["status_code"] == 400 and results["b"]["response"]["body"]["error"]["code"] == "x"
    assert set(results["c"]) == {"id", "custom_id", "response", "error"}
    assert results["c"]["id"].startswith("batch_req_")
    assert set(results["c"]["response"]) == {"status_code", "request_id", "body"}


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([], [(None, "empty_file", None)]),
        ([b"", b"  "], [(None, "empty_file", None)]),
        ([line("a"), b"{no", line("b")], [(2, "invalid_json_line", None)]),
        ([[1]], [(1, "invalid_json_line", None)]),
        ([line("a"), b"", line("a")], [(3, "duplicate_custom_id", "custom_id")]),
        ([line("")], [(1, "invalid_value", "custom_id")]),
        ([{**line("a"), "custom_id": 7}], [(1, "invalid_value", "custom_id")]),
        ([{"custom_id": "a"}], [(1, "missing_required_parameter", name) for name in ("method", "url", "body")]),
        ([{**line("a"), "method": "GET"}], [(1, "invalid_method", "method")]),
        ([{**line("a"), "url": "/v1/embeddings"}], [(1, "url_mismatch", "url")]),
        ([{**line("a"), "body": []}], [(1, "invalid_value", "body")]),
        ([{**line("a"), "priority": 1}], [(1, "unknown_parameter", "priority")]),
        ([line("a", stream=True), line("b", stream=False)], [(1, "invalid_value", "body.stream")]),
        ([line(str(i)) for i in range(9)], [(None, "too_many_tasks", None)]),
        ([line("a", text="x" * 8192)], [(1, "line_too_long", None)]),
        (
            [line("a"), line("b", text="x" * 8192), line("a")],
            [(2, "line_too_long", None), (3, "duplicate_custom_id", "custom_id")],
        ),
    ],
)  # fmt: skip
def test_a_wrong_input_fails_with_its_line_numbers(tmp_path, items, found) -> None:
    record, results = asyncio.run(run_one(tmp_path, items, max_batch_lines=8, max_body_bytes=1024))
    assert record.status == "failed" and record.failed_at and not results
    assert codes(record) == found
    assert all(problem.message for problem in (record.errors.data if record.errors else []))


def test_a_cancelled_batch_keeps_its_answers(tmp_path) -> None:
    async def ask(path, body, tenant, label, set_calls):
        if b"slow" in body:
            set_calls(1)
            await asyncio.sleep(3600)
        return await echo(path, body, tenant, label, set_calls)

    async def main() -> None:
        async with Service(tmp_path, ask, max_batch_calls=2) as service:
            record = await service.create([line("a"), line("slow"), line("b"), *(line(f"{i} slow") for i in range(4))])
            while record.request_counts.completed < 2:
                await asyncio.sleep(0.001)
            cancelling = await service.service.cancel("", record.id)
            assert cancelling.status == "cancelling" and cancelling.cancelling_at
            while not record.has_ended:
                assert (await service.service.cancel("", record.id)).status == "cancelling"
                await asyncio.sleep(0)
            await service.end_of(record)
            results = service.results(record)
            assert record.status == "cancelled" and record.cancelled_at and record.request_counts.completed == 2
            assert len(results) == record.request_counts.total == 7
            error = {"code": "batch_cancelled", "message": batch_message("cancelled")}
            assert results["slow"]["error"] == error and results["slow"]["response"] is None
            assert results["3 slow"]["error"] == error
            with pytest.raises(ApiError, match="cancelled cannot be cancelled") as refused:
                await service.service.cancel("", record.id)
            assert refused.value.status == 409

    asyncio.run(main())


def batch_message(ending):
    from plait.runtime.server.batches.batch_run import NOT_RUN

    return NOT_RUN[ending][1]


def test_an_expired_batch_keeps_its_answers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(batch_service, "COMPLETION_WINDOW_S", 2)  # its end is cut to whole seconds

    async def ask(path, body, tenant, label, set_calls):
        if b'"slow"' in body:
            set_calls(1)
            await asyncio.sleep(3600)
        return await echo(path, body, tenant, label, set_calls)

    record, results = asyncio.run(run_one(tmp_path, [line("a"), line("slow")], ask))
    assert record.status == "expired" and record.expired_at >= record.expires_at
    assert (record.request_counts.completed, record.request_counts.failed) == (1, 1)
    assert results["slow"]["error"]["code"] == "batch_expired" and results["a"]["response"]["status_code"] == 200


def test_refusals_for_lack_of_capacity_are_repeated(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(line_runner, "FIRST_PAUSE_S", 0.001)
    runs = {"a": 0, "lost": 0, "full": 0}

    async def ask(path, body, tenant, label, set_calls):
        name = next(name for name in runs if f'"{name}"'.encode() in body)
        runs[name] += 1
        if name == "a" and runs[name] == 3:
            return await echo(path, body, tenant, label, set_calls)
        code = b"runtime_gone" if name == "lost" else b"queue_full"
        return line_runner.LineAnswer(503, "req-1", b'{"error": {"code": "%s"}}' % code)

    _, results = asyncio.run(run_one(tmp_path, [line(name) for name in runs], ask))
    assert runs == {"a": 3, "lost": 2, "full": line_runner.MAX_RUNS}
    assert [results[name]["response"]["status_code"] for name in runs] == [200, 503, 503]


def test_a_line_that_a_shutdown_aborts_is_run_by_the_next_server(tmp_path) -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def ask(path, body, tenant, label, set_calls):
            set_calls(1)
            service.is_draining = True
            asked.set()
            return line_runner.LineAnswer(503, "req-1", b'{"error": {"code": "aborted"}}')

        async with Service(tmp_path, ask) as service:
            record = await service.create([line("a"), line("b")])
            await asked.wait()
            await asyncio.sleep(0.05)
            assert record.status == "in_progress" and record.request_counts.failed == 0
        async with Service(tmp_path) as service:
            record = await service.end_of(service.service.get("", record.id))
            assert (record.status, record.request_counts.completed) == ("completed", 2)

    asyncio.run(main())


def test_a_full_disk_fails_the_batch_and_keeps_what_is_stored(tmp_path, monkeypatch) -> None:
    real, num_writes = result_file.write_all, 0

    def write_all(descriptor, data):
        nonlocal num_writes
        num_writes += 1
        if num_writes > 2:
            os.write(descriptor, data[:7])  # what still fits
            raise OSError(errno.ENOSPC, "no space")
        real(descriptor, data)

    monkeypatch.setattr(result_file, "write_all", write_all)
    items = [line(str(i)) for i in range(6)]
    record, results = asyncio.run(run_one(tmp_path, items, max_batch_calls=1))
    assert record.status == "failed" and codes(record) == [(None, "disk_full", None)]
    assert set(results) == {"0", "1"} and record.request_counts.completed == 2


def test_results_beyond_the_quota_fail_the_batch(tmp_path) -> None:
    items = [line(str(i), text="x" * 40) for i in range(6)]
    quota = max(1024, len(as_lines(items)) + 400)
    record, results = asyncio.run(run_one(tmp_path, items, max_batch_calls=1, max_stored_bytes_per_key=quota))
    assert record.status == "failed" and codes(record) == [(None, "storage_quota_exceeded", None)]
    assert 0 < len(results) < 6


def test_damaged_results_fail_the_batch_by_name(tmp_path) -> None:
    async def stuck(*arguments):
        await asyncio.sleep(3600)

    async def main() -> None:
        async with Service(tmp_path, stuck) as service:
            record = await service.create([line("a"), line("b")])
            while record.status != "in_progress":
                await asyncio.sleep(0.001)
        path = service.service.files.content_path(record.output_id)
        path.write_bytes(b'{"custom_id": "a", "resp\x00"}\n{"custom_id": "b"}\n')
        async with Service(tmp_path) as service:
            record = await service.end_of(service.service.get("", record.id))
            assert codes(record) == [(None, "damaged_results", None)]
            assert path.name in record.errors.data[0].message and "line 1" in record.errors.data[0].message

    asyncio.run(main())


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"id": "x"}', b"\xff"])
def test_a_damaged_record_is_named_at_the_start(tmp_path, damage) -> None:
    async def main() -> str:
        async with Service(tmp_path) as service:
            return (await service.end_of(await service.create([line("a")]))).id

    path = tmp_path / "batches" / f"{asyncio.run(main())}.json"
    path.write_bytes(damage)
    with pytest.raises(InputError, match="is damaged") as error:
        Service(tmp_path)
    assert str(path) in str(error.value)


def test_a_directory_serves_one_server_at_a_time(tmp_path) -> None:
    first = Service(tmp_path)
    with pytest.raises(InputError, match="another server uses it"):
        Service(tmp_path)
    first.directory.close()
    Service(tmp_path).directory.close()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match="every account can write"):
        Service(tmp_path / "open")


def test_files_and_folders_are_private(tmp_path) -> None:
    asyncio.run(run_one(tmp_path / "new", [line("a")]))
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*")}
    assert len(modes) >= 6
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


def test_only_keys_of_the_server_are_continued(tmp_path) -> None:
    async def stuck(*arguments):
        await asyncio.sleep(3600)

    async def main() -> None:
        async with Service(tmp_path, stuck, api_keys={"k": "0" * 64}) as service:
            record = await service.create([line("a")], tenant="k")
        async with Service(tmp_path, api_keys={"other": "0" * 64}) as service:
            await asyncio.sleep(0.05)
            assert not service.service.get("k", record.id).has_ended
        async with Service(tmp_path, api_keys={"k": "0" * 64}) as service:
            assert (await service.end_of(service.service.get("k", record.id))).status == "completed"

    asyncio.run(main())


def test_an_input_is_checked_once(tmp_path, monkeypatch) -> None:
    """An index of its lines stays on disk. A server without one, of an earlier version, checks once more."""
    real, num_checks = batch_run.check_input, 0

    async def check(*arguments):
        nonlocal num_checks
        num_checks += 1
        return await real(*arguments)

    async def ask(path, body, tenant, label, set_calls):
        if b"slow" in body:
            set_calls(1)
            await asyncio.sleep(3600)
        return await echo(path, body, tenant, label, set_calls)

    async def main() -> None:
        monkeypatch.setattr(batch_run, "check_input", check)
        async with Service(tmp_path, ask) as service:
            record = await service.create([line("a"), line("b slow")])
            while record.request_counts.completed < 1:
                await asyncio.sleep(0.001)
        async with Service(tmp_path, ask, max_batch_lines=1) as service:  # what was accepted stays accepted
            record = service.service.get("", record.id)
            await asyncio.sleep(0.05)
            assert record.status == "in_progress" and num_checks == 1
        (tmp_path / "batches" / f"{record.id}.lines").unlink()
        async with Service(tmp_path) as service:
            record = await service.end_of(service.service.get("", record.id))
            assert (record.status, record.request_counts.total, num_checks) == ("completed", 2, 2)
            assert set(service.results(record)) == {"a", "b slow"}
            assert not [*(tmp_path / "batches").glob("*.lines")]

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["content", "index", "other lines"])
def test_an_input_that_changes_fails_the_batch_and_keeps_the_answers(tmp_path, damage) -> None:
    async def ask(path, body, tenant, label, set_calls):
        if b"slow" in body:
            set_calls(1)
            await asyncio.sleep(3600)
        return await echo(path, body, tenant, label, set_calls)

    async def main() -> None:
        async with Service(tmp_path, ask) as service:
            record = await service.create([line("a"), line("b slow")])
            while record.request_counts.completed < 1:
                await asyncio.sleep(0.001)
            content = service.service.files.content_path(record.input_file_id)
        if damage == "content":
            os.truncate(content, 90)
        elif damage == "index":
            os.truncate(tmp_path / "batches" / f"{record.id}.lines", 40)
        else:
            content.write_bytes(content.read_bytes().replace(b'"b slow"', b'"c slow"'))
        async with Service(tmp_path) as service:
            record = await service.end_of(service.service.get("", record.id))
            assert record.status == "failed" and codes(record) == [(None, "input_changed", None)]
            assert (record.request_counts.total, record.request_counts.completed, record.usage.output_tokens) == (
                2,
                1,
                2,
            )
            assert set(service.results(record)) == {"a"}

    asyncio.run(main())


def test_the_number_of_files_and_batches_of_a_key_is_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(batch_service, "KEPT_PER_KEY", 2)

    async def main() -> None:
        async with Service(tmp_path, max_files_per_key=8) as service:
            ids = [(await service.end_of(await service.create([line("a")]))).id for _ in range(3)]
            kept = {record.id for record in service.service.of_tenant("")}
            assert len(kept) == 2 and ids[2] in kept
            assert {path.stem for path in (tmp_path / "batches").iterdir()} == kept
            with pytest.raises(QuotaExceeded, match="8 files"):
                await service.create([line("a")])

    asyncio.run(main())


def test_what_has_expired_is_removed(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with Service(tmp_path) as service:
            record = await service.end_of(await service.create([line("a")]))
            await service.service._remove_expired()
            assert len(service.service.files.of_tenant("")) == 2
            later = time.time() + 40 * 86_400
            monkeypatch.setattr(time, "time", lambda: later)
            assert service.service.files.of_tenant("") == []
            await service.service._remove_expired()
            assert not [*(tmp_path / "files").iterdir(), *(tmp_path / "batches").iterdir()]
            with pytest.raises(ApiError, match="there is no batch"):
                service.service.get("", record.id)
            assert service.service.files._num_bytes[""] == 0

    asyncio.run(main())


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_batch_that_fails_stops_no_other_batch(tmp_path, monkeypatch, is_disk_full) -> None:
    """The task of a line is made in the turn in which an earlier line fails, and so cancelled before it begins."""
    keys = {"a": "0" * 64, "b": "1" * 64}

    async def main() -> None:
        items = [line(str(i), text="x" * 40) for i in range(30)]
        async with Service(tmp_path, max_batch_calls=3, api_keys=keys) as service:
            quota = service.service.files.settings.max_stored_bytes_per_key
            service.service.files._num_bytes["a"] = quota - len(as_lines(items)) - 600
            real, num_writes = result_file.write_all, 0

            def write_all(descriptor, data):
                nonlocal num_writes
                num_writes += 1
                if num_writes > 2:
                    raise OSError(errno.ENOSPC, "no space")
                real(descriptor, data)

            if is_disk_full:
                monkeypatch.setattr(result_file, "write_all", write_all)
            for _ in range(4):  # more lines than slots could be lost
                failed = await service.end_of(await service.create(items, tenant="a"))
                assert failed.status == "failed" and failed.request_counts.completed < 30
                service.service.files._num_bytes["a"] -= len(as_lines(items))
            assert service.service._slots.num_calls == 0
            monkeypatch.setattr(result_file, "write_all", real)
            assert (await service.end_of(await service.create([line("a")], tenant="b"))).status == "completed"

    asyncio.run(main())


@pytest.mark.parametrize("fails", ["results", "end"])
def test_a_batch_that_has_ended_stays_ended_whatever_the_disk_does(tmp_path, monkeypatch, fails) -> None:
    """The end is on disk before a client sees it, and the results are files by then."""
    monkeypatch.setattr(batch_run, "FIRST_PAUSE_S", 0.01)
    real_write, real_append, is_full, refusals = batch_run.write_record, result_file.write_all, False, 0

    def write_record(path, encoded):
        nonlocal refusals
        if is_full:
            refusals += 1
            raise OSError(errno.ENOSPC, "no space")
        real_write(path, encoded)

    def write_all(descriptor, data):
        nonlocal is_full
        if fails == "results" and b'"2"' in data:
            is_full = True
            raise OSError(errno.ENOSPC, "no space")
        real_append(descriptor, data)

    async def main() -> None:
        nonlocal is_full
        for module in (batch_run, file_store):
            monkeypatch.setattr(module, "write_record", write_record)
        monkeypatch.setattr(result_file, "write_all", write_all)

        async def ask(path, body, tenant, label, set_calls):
            nonlocal is_full
            is_full = is_full or (fails == "end" and b'"3"' in body)
            return await echo(path, body, tenant, label, set_calls)

        async with Service(tmp_path, ask, max_batch_calls=1) as service:
            record = await service.create([line(str(i)) for i in range(4)])
            while refusals < 5:
                await asyncio.sleep(0.001)
                assert not record.has_ended
            is_full = False
            await service.end_of(record)
            assert record.status == "failed" and codes(record) == [(None, "disk_full", None)]
            results = service.results(record)
            assert len(results) == record.request_counts.completed == (2 if fails == "results" else 4)
            assert service.service.files._num_files[""] == 2
        async with Service(tmp_path) as service:
            again = service.service.get("", record.id)
            assert again == record and service.results(again) == results

    asyncio.run(main())


def test_results_stay_until_the_end_of_their_batch_is_on_disk(tmp_path, monkeypatch) -> None:
    """Else a batch that goes on after a kill would find no results, and run its lines again."""
    real, asked = batch_run.write_record, []

    def write_record(path, encoded):
        if b'"status": "completed"' in encoded:
            raise OSError(errno.ENOSPC, "no space")
        real(path, encoded)

    async def ask(path, body, tenant, label, set_calls):
        asked.append(label)
        return await echo(path, body, tenant, label, set_calls)

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batch_run, "write_record", write_record)
            async with Service(tmp_path, ask) as service:
                record = await service.create([line("a"), line("b")])
                while not service.service.files.has(record.output_id):
                    await asyncio.sleep(0.001)
                with pytest.raises(ApiError, match=f"used by {record.id}") as refused:
                    await service.service.delete_file("", record.output_id)
                assert refused.value.status == 409 and not record.has_ended
        async with Service(tmp_path, ask) as service:
            record = await service.end_of(service.service.get("", record.id))
            assert record.status == "completed" and set(service.results(record)) == {"a", "b"}
            assert len(asked) == 2 and service.service.files._num_files[""] == 2
            await service.service.delete_file("", record.output_file_id)
        async with Service(tmp_path, ask) as service:
            assert service.service.get("", record.id) == record and service.service.files._num_files[""] == 1

    asyncio.run(main())
