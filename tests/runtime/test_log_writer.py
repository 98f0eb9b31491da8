"""LogWriter: a full pipe stops nobody, dropped lines are counted and reported, and nothing else is lost."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from plait.runtime import log_writer
from plait.runtime.log_writer import MAX_WAITING_BYTES, LogWriter


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(log_writer, "FLUSH_TIMEOUT_S", 60.0)
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(fd)


def read_lines(fd: int, num_lines: int) -> list[str]:
    data = b""
    while data.count(b"\n") < num_lines:
        data += os.read(fd, 65536)
    return data.decode().splitlines()


def test_lines_are_written_in_order(pipe) -> None:
    writer = LogWriter(pipe[1])
    lines = [f"line {number} \udcff é" for number in range(500)]
    for line in lines:
        writer.put(line + "\n")
    assert writer.flush()
    assert read_lines(pipe[0], 500) == [line.replace("\udcff", "\\udcff") for line in lines]
    assert writer.num_dropped == 0


def test_a_full_pipe_drops_and_reports(pipe) -> None:
    writer = LogWriter(pipe[1])
    line = "x" * 999 + "\n"
    for _ in range(3000):  # without a reader: this would wait for ever
        writer.put(line)
    assert writer.num_dropped >= 3000 - (MAX_WAITING_BYTES + (1 << 20)) // 1000  # a pipe holds at most 1 MiB
    assert writer._num_waiting_bytes <= MAX_WAITING_BYTES
    num_dropped = writer.num_dropped
    # One report at the end, and more before if the writer's thread was late and made room between two drops.
    data, num_reported, num_lines = b"", 0, 0
    while (num_reported, num_lines) != (num_dropped, 3000 - num_dropped):
        data += os.read(pipe[0], 65536)
        complete = data.decode().split("\n")[:-1]
        reports = [int(text.split()[0]) for text in complete if text.endswith("because nobody read the log")]
        num_reported, num_lines = sum(reports), len(complete) - len(reports)
        assert num_reported <= num_dropped and num_lines <= 3000 - num_dropped
    assert reports
    writer.put("again\n")
    assert read_lines(pipe[0], 1) == ["again"]
    assert writer.flush() and writer.num_dropped == num_dropped


def test_flush_does_not_wait_for_a_reader_that_takes_nothing(pipe, monkeypatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_TIMEOUT_S", 0.1)
    writer = LogWriter(pipe[1])
    for _ in range(300):
        writer.put("x" * 9999 + "\n")
    assert not writer.flush()
    monkeypatch.setattr(log_writer, "FLUSH_TIMEOUT_S", 60.0)
    os.close(pipe[0])
    assert writer.flush()  # its thread must not write to a later pipe of the same number


def test_flush_waits_for_a_slow_reader(pipe) -> None:
    writer = LogWriter(pipe[1])
    for _ in range(100):
        writer.put("x" * 9999 + "\n")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(read_lines(pipe[0], 100)))
    reader.start()
    assert writer.flush()
    reader.join(60)
    assert len(lines) == 100 and writer.num_dropped == 0


def test_a_pipe_without_a_reader_counts_as_dropped(pipe) -> None:
    writer = LogWriter(pipe[1])
    os.close(pipe[0])
    writer.put("a\n")
    assert writer.flush() and writer.num_dropped == 1


def test_a_non_blocking_pipe_is_waited_for(pipe) -> None:
    os.set_blocking(pipe[1], False)
    writer = LogWriter(pipe[1])
    for _ in range(100):
        writer.put("x" * 9999 + "\n")
    assert len(read_lines(pipe[0], 100)) == 100 and writer.num_dropped == 0
