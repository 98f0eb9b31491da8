"""Streamed runs: pieces of text, waiting for variables, synchronous and asynchronous readers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest
from sample_programs import collect, qa
from scripted_scheduler import Gate

import plait
from plait import gen

pytestmark = pytest.mark.timeout(120)


def test_text_iter_yields_pieces_before_the_answer_ends(backend):
    first, second = Gate("early late", early="early"), Gate("two")
    backend.script(("1:", first), ("2:", second))

    @plait.function
    def program(s):
        s += "1:" + gen("a") + "2:" + gen("b")
        return s["b"]

    state = program.run(stream=True)
    pieces = state.text_iter("a")
    assert next(pieces) + next(pieces) == "early"
    first.open()
    assert "".join(pieces) == " late"
    all_pieces = state.text_iter()
    assert next(all_pieces) == "1:"
    assert "b" in state and state["a"] == "early late"
    second.open()
    assert "1:" + "".join(all_pieces) == "1:early late2:two" == state.text()
    assert state.ret_value == "two"
    assert list(state.text_iter(var_name="b")) == ["two"]


def test_read_waits_for_its_variable_until_the_body_ends(backend):
    go = threading.Event()

    @plait.function
    def program(s):
        go.wait(60)
        s += "p" + gen("late")

    state = program.run(stream=True)
    assert "late" not in state
    threading.Timer(0.05, go.set).start()
    assert state["late"] == " fine."
    with pytest.raises(plait.MissingVariable):
        state["never"]


def test_reads_inside_the_body_do_not_wait_for_its_end(backend):
    @plait.function
    def program(s):
        s += "p" + gen("x")
        assert list(s.text_iter()) == ["p", " fin", "e."]
        assert s.error() is None and s.usage.calls == 1 and s.ret_value is None
        s.sync()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert isinstance(pool.submit(s.get_var, "y").exception(), KeyError)
        s["y"]

    state = program.run(stream=True)
    assert isinstance(state.error(), plait.MissingVariable)


def test_async_iterators_yield_text_and_meta_info(backend):
    gate = Gate("early late", early="early")
    backend.script(("1:", gate))

    @plait.function
    def program(s):
        time.sleep(0.02)
        s += plait.user("hi") + "1:" + gen("a") + plait.select("b", ["x", "y"])

    async def read():
        state = program.run(stream=True)
        seen = []
        async for piece in state.text_async_iter("a"):
            seen.append(piece)
            gate.open()
        all_pieces = await collect(state.text_async_iter())
        with_meta = await collect(state.text_async_iter("a", return_meta_data=True))
        choice = await collect(state.text_async_iter("b", return_meta_data=True))
        with pytest.raises(plait.MissingVariable):
            await collect(state.text_async_iter("c"))
        return state, seen, all_pieces, with_meta, choice

    state, seen, all_pieces, with_meta, choice = asyncio.run(read())
    assert "".join(seen) == "early late"
    assert "".join(all_pieces) == state.text()
    assert all(meta == {"finish_reason": None} for _, meta in with_meta[:-1])
    assert with_meta[-1] == ("", state.get_meta_info("a"))
    assert [piece for piece, _ in choice] == ["x", ""]
    with pytest.raises(plait.InputError, match="needs the name"):
        state.text_async_iter(return_meta_data=True)


def test_fifty_async_readers_on_one_loop(backend):
    async def read_one(i):
        state = qa.run(f"q{i}", stream=True)
        return "".join(await collect(state.text_async_iter("answer")))

    async def read_all():
        return await asyncio.gather(*(read_one(i) for i in range(50)))

    assert asyncio.run(read_all()) == [" fine."] * 50
