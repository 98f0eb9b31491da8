"""Uploads and files over HTTP: wrong bodies, limits, quotas, and what another key sees."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from plait.runtime.server.batches import batch_service
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.protocols.batches import files as upload_module

KEYS = {"ann": digest(b"key-a"), "bob": digest(b"key-b")}
ANN, BOB = ({"authorization": f"Bearer key-{name}"} for name in "ab")
LINE = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "default", "prompt": "hi"}}
).encode()
LIMITS = {"max_file_bytes": 2048, "max_batch_lines": 5, "max_files_per_key": 3, "max_stored_bytes_per_key": 4096}


@pytest.fixture
def files(serve, tmp_path):
    """A server with small limits and two keys: its address and the folder of its files."""
    address, _ = serve(files_dir=str(tmp_path / "state"), api_keys=KEYS, **LIMITS)
    return address, tmp_path / "state" / "files"


SECONDS = "expires_after[seconds]"


def post(address, data=LINE, fields=None, headers=ANN, **options):
    fields = {"purpose": "batch"} if fields is None else fields
    form = {"files": {"file": ("in.jsonl", data)}} if data is not None else {"files": {"x": (None, "")}}
    return httpx.post(f"{address}/v1/files", data=fields, **form, headers=headers, timeout=60, **options)


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"]


def test_wrong_forms_are_refused_and_leave_nothing(files) -> None:
    address, folder = files
    after = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    for fields, found in (
        ({}, ("missing_required_parameter", "purpose")),
        ({"purpose": "fine-tune"}, ("invalid_value", "purpose")),
        ({"purpose": "batch", "name": "x"}, ("unknown_parameter", "name")),
        ({"purpose": "batch" * 1000}, ("invalid_form", None)),
        (after, ("missing_required_parameter", "expires_after.seconds")),
        (after | {"expires_after[seconds]": "1"}, ("invalid_value", "expires_after.seconds")),
        (after | {"expires_after[seconds]": "soon"}, ("invalid_value", "expires_after.seconds")),
    ):
        assert error_of(post(address, fields=fields), 400) == found
    both = [("file", ("a", LINE)), ("file", ("b", LINE))]
    answer = httpx.post(f"{address}/v1/files", data={"purpose": "batch"}, files=both, headers=ANN)
    assert error_of(answer, 400) == ("invalid_value", "file")
    answer = httpx.post(f"{address}/v1/files", files={"purpose": (None, "batch")}, headers=ANN)
    assert error_of(answer, 400) == ("missing_required_parameter", "file")
    for content_type in ("application/json", "multipart/form-data", "text/plain; boundary=x"):
        answer = httpx.post(f"{address}/v1/files", content=b"{}", headers=ANN | {"content-type": content_type})
        assert error_of(answer, 415) == ("unsupported_media_type", None)
    assert not [*folder.iterdir()]


PIECES = [
    *(b"--x\r\n", b"--x--\r\n", b"\r\n", b"\r\n\r\n", b"\x00\xff", b"-" * 9000, b"--x"),
    b'Content-Disposition: form-data; name="purpose"',
    b"batch",
    b'content-disposition: form-data; name="file"; filename="../a"',
]


@given(body=st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_forms_are_no_server_error(files, body) -> None:
    address, folder = files
    headers = ANN | {"content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{address}/v1/files", content=body, headers=headers, timeout=60)
    if answer.status_code == 200:
        assert httpx.delete(f"{address}/v1/files/{answer.json()['id']}", headers=ANN).status_code == 200
    else:
        assert answer.status_code in (400, 413), answer.text
    assert not [*folder.iterdir()]


def test_limits_of_a_file_and_of_a_key(files) -> None:
    address, folder = files
    assert error_of(post(address, b"x" * 2049), 413) == ("file_too_large", "file")
    assert error_of(post(address, b"\n" * 6), 400) == ("too_many_lines", "file")
    assert error_of(post(address, b"x" * 100_000), 413) == ("body_too_large", None)
    ids = [post(address, b"x" * 2000).json()["id"] for _ in range(2)]
    assert error_of(post(address, b"x" * 200), 403) == ("storage_quota_exceeded", None)
    assert post(address, b"x" * 2000, headers=BOB).status_code == 200, "another key has its own quota"
    assert httpx.delete(f"{address}/v1/files/{ids[0]}", headers=ANN).status_code == 200
    assert [post(address, LINE).status_code for _ in range(3)] == [200, 200, 403]
    assert len([*folder.glob("*.content")]) == len([*folder.glob("*.json")]) == 4


def test_uploads_at_once_keep_to_the_number_of_files(files, monkeypatch) -> None:
    address, folder = files
    real, has_all = upload_module.write_all, threading.Event()

    def write_late(descriptor, data):
        has_all.wait(30)
        real(descriptor, data)

    monkeypatch.setattr(upload_module, "write_all", write_late)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(post, address) for _ in range(6)]
        assert wait_until(
            lambda: sum(answer.done() for answer in answers) == 3 or len([*folder.glob("*.content")]) == 6
        )
        has_all.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * 3 + [403] * 3
    ids = [item["id"] for item in httpx.get(f"{address}/v1/files", headers=ANN).json()["data"]]
    assert len(ids) == 3
    httpx.delete(f"{address}/v1/files/{ids[0]}", headers=ANN)
    assert error_of(post(address, fields={"purpose": "other"}), 400)[1] == "purpose"
    assert [post(address).status_code for _ in range(2)] == [200, 403]


def test_large_uploads_are_larger_than_other_bodies(serve, tmp_path, monkeypatch) -> None:
    address, state = serve(files_dir=str(tmp_path), max_body_bytes=2048)
    data, sizes = os.urandom(3 << 20).replace(b"\n", b"x"), []
    monkeypatch.setattr(state.admission.queue, "set_size", lambda *size: sizes.append(size))
    answer = post(address, data)
    assert sizes == [], "an upload is no prompt, for which others would wait"
    monkeypatch.undo()
    assert answer.status_code == 200 and answer.json()["bytes"] == len(data)
    content = httpx.get(f"{address}/v1/files/{answer.json()['id']}/content")
    assert content.content == data and content.headers["x-content-type-options"] == "nosniff"
    assert error_of(httpx.post(f"{address}/v1/batches", json={"input_file_id": "x" * 4096}), 413)[0] == "body_too_large"


def test_a_key_sees_its_own_only(files) -> None:
    address, _ = files
    file_id = post(address, LINE).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = httpx.post(f"{address}/v1/batches", json=body, headers=ANN).json()["id"]
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
    ):
        assert httpx.request(method, address + path, headers=BOB).status_code == 404
        assert httpx.request(method, address + path).status_code == 401
    assert httpx.post(f"{address}/v1/batches", json=body, headers=BOB).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert httpx.get(address + path, headers=BOB).json()["data"] == []
        assert len(httpx.get(address + path, headers=ANN).json()["data"]) >= 1
    url = f"{address}/v1/batches/{batch_id}"
    assert wait_until(lambda: httpx.get(url, headers=ANN).json()["status"] == "completed")
    output_id = httpx.get(url, headers=ANN).json()["output_file_id"]
    assert httpx.get(f"{address}/v1/files/{output_id}/content", headers=BOB).status_code == 404


@pytest.mark.parametrize("name", ["../lock", "..%2flock", "file-x", "%00", "lock"])
def test_an_id_is_no_path(files, name) -> None:
    address, _ = files
    requests = (("GET", f"/v1/files/{name}/content"), ("DELETE", f"/v1/files/{name}"), ("GET", f"/v1/batches/{name}"))
    for method, path in requests:
        assert httpx.request(method, f"{address}{path}", headers=ANN).status_code in (404, 405)


def test_unknown_query_parameters_are_refused(files) -> None:
    address, _ = files
    for query in ("?limit=0", "?limit=x", "?order=up", "?sort=1", "?purpose=x"):
        param = query[1:].partition("=")[0]
        assert error_of(httpx.get(f"{address}/v1/files{query}", headers=ANN), 400)[1] == param
    assert error_of(httpx.get(f"{address}/v1/batches?limit=101", headers=ANN), 400)[1] == "limit"
    assert error_of(httpx.get(f"{address}/v1/batches?after=batch_0", headers=ANN), 404)[1] == "after"
    assert error_of(httpx.get(f"{address}/v1/files/file-0?limit=1", headers=ANN), 400)[1] == "limit"
    answer = httpx.get(f"{address}/v1/files?limit=-1", headers=ANN)
    assert "Expected `int` >= 1" in answer.text, answer.text
    answer = post(address, fields={"purpose": "batch", "expires_after[anchor]": "created_at", SECONDS: "-1"})
    assert "Expected `int` >= 3600" in answer.text, answer.text


def test_a_content_that_cannot_be_read_is_said(files) -> None:
    address, folder = files
    file_id = post(address).json()["id"]
    (folder / f"{file_id}.content").unlink()
    answer = httpx.get(f"{address}/v1/files/{file_id}/content", headers=ANN)
    assert error_of(answer, 500) == ("storage_error", None) and "cannot read" in answer.text


def test_a_wrong_method_gets_all_that_the_path_takes(files) -> None:
    address, _ = files
    for path, methods in (("", "GET, POST"), ("/file-0", "DELETE, GET"), ("/file-0/content", "GET")):
        answer = httpx.put(f"{address}/v1/files{path}", headers=ANN)
        assert error_of(answer, 405) == (None, None)
        assert answer.headers["allow"] == methods and f"takes {methods}, not PUT" in answer.text


def test_a_full_disk_is_said(files, monkeypatch) -> None:
    address, folder = files

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(upload_module, "write_all", full)
    assert error_of(post(address), 507) == ("disk_full", None)
    assert not [*folder.iterdir()]
    monkeypatch.undo()
    assert post(address).status_code == 200, "nothing is counted for the failed upload"


def test_a_key_has_a_bounded_number_of_batches(files, monkeypatch) -> None:
    address, _ = files
    monkeypatch.setattr(batch_service, "MAX_UNFINISHED_PER_KEY", 0)
    body = {"input_file_id": post(address).json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = httpx.post(f"{address}/v1/batches", json=body, headers=ANN)
    assert error_of(answer, 429) == ("rate_limit_exceeded", None)


def test_a_server_without_a_directory_says_so(serve) -> None:
    address, _ = serve()
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ):
        answer = httpx.request(method, address + path)
        assert error_of(answer, 404)[0] == "files_not_enabled" and "--files-dir" in answer.text
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert error_of(httpx.post(f"{address}/v1/batches", json=body), 404)[0] == "files_not_enabled"
