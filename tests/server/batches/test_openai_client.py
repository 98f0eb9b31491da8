"""Files and batches with OpenAI's own client, on the embedded model."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from pathlib import Path

import openai
import pytest
from batch_clients import CHAT, create, end_of, line, results, upload
from waiting import wait_until


def without_ids(body):
    """The answer as text, without ids, times, and what was found in the cache."""
    text = re.sub(
        r'"(created|created_at|completed_at|cached_tokens|cache_write_tokens)": [\d.]+',
        "",
        json.dumps(body, sort_keys=True),
    )
    return re.sub(r"(chatcmpl-|cmpl-|[a-z]+_)[0-9a-f]{12,}", "", text)


BODIES = {
    CHAT: {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 12,
        "seed": 5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "c",
                "schema": {
                    "type": "object",
                    "properties": {"c": {"type": "string", "maxLength": 9}},
                    "required": ["c"],
                },
            },
        },
    },
    "/v1/completions": {"prompt": ["One, two,", "A, b,"], "max_tokens": 6, "n": 2, "seed": 3, "logprobs": 1},
    "/v1/responses": {"input": "Say hi.", "max_output_tokens": 16, "temperature": 0.0},
}


@pytest.mark.parametrize("url", BODIES)
def test_answers_are_those_of_the_endpoint(smollm, url) -> None:
    """The answer in a batch is that to the same request over HTTP, and so is its error."""
    body = {"model": "default", **BODIES[url]}
    items = [
        line("good", url, **BODIES[url]),
        line("wrong", url, **BODIES[url], stop_sequence=1),
        line("other", url, model="x"),
    ]
    items[2]["body"] |= BODIES[url]
    batch = end_of(smollm, create(smollm, items, url, metadata={"job": "7"}))
    assert batch.status == "completed" and batch.metadata == {"job": "7"} and batch.endpoint == url
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    output, errors = results(smollm, batch)
    assert set(output) == {"good"} and set(errors) == {"wrong", "other"}
    direct = smollm.post(url.removeprefix("/v1"), cast_to=object, body=body)
    answer = output["good"]["response"]["body"]
    assert without_ids(answer) == without_ids(direct)
    assert answer["usage"]["total_tokens"] == batch.usage.total_tokens > 0
    for name, status in (("wrong", 400), ("other", 404)):
        with pytest.raises(openai.APIStatusError) as refused:
            smollm.post(url.removeprefix("/v1"), cast_to=object, body=items[1 if name == "wrong" else 2]["body"])
        response = errors[name]["response"]
        assert response["status_code"] == status == refused.value.status_code
        assert response["body"]["error"] == refused.value.body
        assert errors[name]["error"] is None and response["request_id"].startswith("req-")


def test_the_page_runs_as_printed(real_address, tmp_path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[3] / "docs" / "batches.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "page.py").write_text(block.replace("http://127.0.0.1:30000", real_address))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py")
    printed = sorted(capsys.readouterr().out.splitlines())
    assert [text[:3] for text in printed] == ["q0 ", "q1 "] and all(len(text) > 10 for text in printed)


def test_a_model_without_embeddings_gives_each_line_its_error(smollm) -> None:
    batch = end_of(smollm, create(smollm, [line("e", "/v1/embeddings", input="hi")], "/v1/embeddings"))
    _, errors = results(smollm, batch)
    assert batch.output_file_id is None
    assert errors["e"]["response"]["body"]["error"]["code"] == "unsupported_by_model"


def test_files_are_listed_read_and_deleted(smollm) -> None:
    text = json.dumps(line("a", CHAT, messages=[]))
    file = smollm.files.create(
        file=("../../étc/x.jsonl", text.encode()),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (file.purpose, file.bytes, file.status, file.object) == ("batch", len(text), "processed", "file")
    assert file.expires_at - file.created_at == 7200 and file.filename == "../../étc/x.jsonl"
    assert smollm.files.retrieve(file.id) == file and smollm.files.content(file.id).text == text
    other = smollm.files.create(file=b"{}", purpose="batch")
    assert other.expires_at - other.created_at == 30 * 86_400
    listed = [item.id for item in smollm.files.list(purpose="batch", limit=1)]  # the client asks for every page
    assert set(listed) >= {file.id, other.id} and len(listed) == len(set(listed))
    ascending = [item.id for item in smollm.files.list(purpose="batch", order="asc")]
    assert ascending == listed[::-1]
    assert smollm.files.delete(file.id).deleted
    for ask in (smollm.files.retrieve, smollm.files.content, smollm.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(file.id)
        assert missing.value.code == "file_not_found"
    smollm.files.delete(other.id)


def test_a_wrong_file_fails_with_line_numbers(smollm) -> None:
    items = [line("a", CHAT, messages=[]), line("a", CHAT, messages=[]), {"custom_id": "b"}, line("c", "/v1/x")]
    batch = end_of(smollm, create(smollm, items, CHAT))
    assert batch.status == "failed" and batch.failed_at and batch.errors.object == "list"
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found[0] == (2, "duplicate_custom_id", "custom_id") and found[-1] == (4, "url_mismatch", "url")
    assert [error for error in found if error[0] == 3] and batch.output_file_id is batch.error_file_id is None


def test_a_batch_is_cancelled_and_listed(smollm) -> None:
    endless = {"prompt": "One,", "max_tokens": 4000, "ignore_eos": True}
    items = [line(str(number), "/v1/completions", **endless) for number in range(3)]
    batch = create(smollm, items, "/v1/completions")
    with pytest.raises(openai.ConflictError, match="is used by batch_"):
        smollm.files.delete(batch.input_file_id)
    assert wait_until(lambda: smollm.batches.retrieve(batch.id).status == "in_progress")
    cancelled = smollm.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "finalizing", "cancelled") and cancelled.cancelling_at
    batch = end_of(smollm, cancelled)
    assert batch.status == "cancelled" and batch.cancelled_at
    output, errors = results(smollm, batch)
    assert len(output) + len(errors) == 3 == batch.request_counts.total
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        smollm.batches.cancel(batch.id)
    smollm.files.delete(batch.input_file_id)

    ids = [item.id for item in smollm.batches.list(limit=2)]  # the client asks for every page
    assert batch.id in ids and len(ids) == len(set(ids))
    times = [item.created_at for item in smollm.batches.list()]
    assert all(first >= second for first, second in itertools.pairwise(times))
    page = smollm.batches.list(limit=1, after=ids[0])
    assert page.data[0].id == ids[1] and page.has_more == (len(ids) > 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"extra_body": {"priority": 3}}, "priority"),
    ],
)
def test_wrong_fields_are_refused_by_name(smollm, fields, param) -> None:
    file = upload(smollm, [line("a", CHAT, messages=[])])
    with pytest.raises(openai.APIStatusError) as refused:
        smollm.batches.create(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields)
    assert refused.value.status_code in (400, 404) and refused.value.param == param


def test_result_files_have_their_own_lifetime_and_start_no_batch(smollm) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    items = [line("a", "/v1/completions", prompt="hi", max_tokens=1)]
    batch = end_of(smollm, create(smollm, items, "/v1/completions", output_expires_after=expires))
    file = smollm.files.retrieve(batch.output_file_id)
    assert file.expires_at - file.created_at == 3600 and file.purpose == "batch_output"
    assert file.filename == f"{batch.id}_output.jsonl"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        smollm.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
