"""What lies in the place of a file of the batches: a FIFO or a device is never waited for, and a link not followed."""

from __future__ import annotations

import asyncio
import os
import threading

import odd_files
import pytest
from batch_services import Service, line

from plait.host.private_file import OddFile
from plait.runtime.errors import InputError
from plait.runtime.server.batches.directory import StateDirectory
from plait.runtime.server.batches.input_file import read_lines
from plait.runtime.server.batches.result_log import ResultLine, ResultLog

pytestmark = pytest.mark.timeout(60)  # a FIFO that is waited for
KINDS = [kind for kind in odd_files.KINDS if kind != "writable"]  # the folder is this account's only


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "files/file-1.json", "batches/batch_1.json"])
def test_the_start_names_what_is_no_file(tmp_path, kind, name) -> None:
    state = tmp_path / "state"
    StateDirectory(state).close()
    (state / name).unlink(missing_ok=True)
    odd_files.put(kind, state / name, b"{}")

    async def main() -> None:
        async with Service(state):
            pass

    with pytest.raises(InputError, match=r"no regular file|dangling"):
        asyncio.run(main())
    assert os.path.lexists(state / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_whose_input_or_index_is_no_file_fails(tmp_path, kind) -> None:
    state = tmp_path / "state"

    async def main() -> None:
        may_start = threading.Event()
        async with Service(state, may_start=may_start.is_set) as service:
            record = await service.create([line("a"), line("b")])
            while record.status != "in_progress":
                await asyncio.sleep(0.001)
            path = service.service.files.content_path(record.input_file_id)
            path.unlink()
            odd_files.put(kind, path, b"content")
            may_start.set()
            await service.end_of(record)
            assert (record.status, record.errors.data[0].code) == ("failed", "storage_error")

    asyncio.run(main())
    odd_files.put(kind, state / "index.lines", b"")
    with pytest.raises(OddFile):
        read_lines(state / "index.lines")


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_not_written_to_what_took_their_place(tmp_path, kind) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    results = ResultLog(folder / "output", folder / "errors", lambda num_bytes: None)
    answer = {"status_code": 200, "request_id": "req-1", "body": {}}
    results.append([ResultLine("batch_req_1", "a", answer, None)])
    (folder / "output").unlink()
    odd_files.put(kind, folder / "output", b"content")
    with pytest.raises(OSError, match=r"regular file|replaced"):
        results.append([ResultLine("batch_req_2", "b", answer, None)])
