"""Reading and ordering of input lines, against slow references."""

from __future__ import annotations

import asyncio
import itertools
import json

from batch_services import URL, as_lines, line
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.server.batches import input_file
from plait.runtime.server.batches.input_file import PREFIX_BYTES, PROMPT_FIELDS, check_input, read_line

texts = st.lists(st.sampled_from([b"a", b"\n", b"{}", b'"x', b"\\", " é".encode(), b"0" * 40]), max_size=40).map(
    b"".join
)


@given(data=texts, read_bytes=st.integers(1, 50), limit=st.integers(10, 60))
@settings(max_examples=150, deadline=None)
def test_lines_are_those_of_the_file(tmp_path_factory, data, read_bytes, limit) -> None:
    path = tmp_path_factory.mktemp("input") / "in"
    path.write_bytes(data)

    async def read():
        return [item async for item in input_file._lines(path, limit)]

    before, input_file.READ_BYTES = input_file.READ_BYTES, read_bytes
    try:
        found = asyncio.run(read())
    finally:
        input_file.READ_BYTES = before
    parts = data.split(b"\n")
    if not parts[-1]:
        parts.pop()
    offsets = [0, *itertools.accumulate(len(part) + 1 for part in parts)]
    expected = [
        (number, offset, part if len(part) <= limit else None)
        for number, (offset, part) in enumerate(zip(offsets, parts, strict=False), 1)
    ]
    assert found == expected


def prompt(item) -> bytes:
    return json.dumps([item["body"].get(name) for name in PROMPT_FIELDS], separators=(",", ":")).encode()


@given(
    heads=st.lists(st.lists(st.sampled_from(["x" * 70, "y" * 70, "z" * 300]), max_size=4), max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_lines_with_a_common_prefix_come_together(tmp_path_factory, heads) -> None:
    path = tmp_path_factory.mktemp("input") / "in"
    items = [line(str(number), prompt="".join(head) + f" {number}") for number, head in enumerate(heads)]
    path.write_bytes(as_lines(items) or b"\n")
    if not items:
        return
    checked = asyncio.run(check_input(path, URL, 1 << 20, 100))
    ids = [read_line(path, found).custom_id for found in checked]
    assert sorted(ids) == sorted(item["custom_id"] for item in items)
    ordered = [items[int(name)] for name in ids]
    for length in PREFIX_BYTES:
        groups = [prompt(item)[:length] for item in ordered]
        runs = [key for key, _ in itertools.groupby(groups)]
        assert len(runs) == len(set(runs)), "a group is split"
    by_start = itertools.groupby(ordered, lambda item: prompt(item)[: PREFIX_BYTES[0]])
    firsts = [min(int(item["custom_id"]) for item in group) for _, group in by_start]
    assert firsts == sorted(firsts), "groups come in the order of their first lines"


def test_conversations_and_documents_are_grouped(tmp_path) -> None:
    documents = ["first " * 100, "second " * 100]
    bodies = [
        {"messages": [{"role": "system", "content": text}, {"role": "user", "content": str(n)}]}
        for n in range(4)
        for text in documents
    ]
    items = [{**line(str(number)), "body": body} for number, body in enumerate(bodies)]
    (tmp_path / "in").write_bytes(as_lines(items))
    checked = asyncio.run(check_input(tmp_path / "in", URL, 1 << 20, 100))
    ids = [read_line(tmp_path / "in", found).custom_id for found in checked]
    assert ids == ["0", "2", "4", "6", "1", "3", "5", "7"]
