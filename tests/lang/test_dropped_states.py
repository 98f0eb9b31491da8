"""A streamed program ends when its state and streams are dropped, and not before."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
import traceback

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen


def wait_for_no_sessions(backend) -> None:
    while backend.scheduler.open_sessions():  # ends by the test's time limit
        gc.collect()
        time.sleep(0.01)


def waits_in_a_reader(thread: int) -> bool:
    """Whether the thread waits for a lock, in a method that reads a state."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    return frames[0].f_code.co_name == "wait" and any("state_reader" in frame.f_code.co_filename for frame in frames)


@pytest.fixture
def endless(backend):
    """A program whose call never ends, and its async twin."""
    backend.script(("p", Gate("never", early="some")))

    @plait.function
    def plain(s):
        s += "p" + gen("x")

    @plait.function
    async def on_a_loop(s):
        s += "p" + gen("x")

    return {"plain": plain, "async": on_a_loop}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_dropped_state_ends_the_program(backend, endless, kind):
    pieces = endless[kind].run(stream=True).text_iter("x")
    assert next(pieces) == "some"  # the stream holds the state
    gc.collect()
    assert backend.scheduler.open_sessions() == 1
    del pieces
    wait_for_no_sessions(backend)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("read", [lambda s: s.text_iter("x"), lambda s: s.text_iter(), lambda s: s.partial_iter("x")])
def test_an_interrupted_reader_of_a_stream_ends_the_program(backend, endless, default_signals, kind, read):
    """The state lives on, as in a traceback that Python keeps for the prompt."""
    state = endless[kind].run(stream=True)

    main = threading.main_thread().ident

    def interrupt():
        while not waits_in_a_reader(main):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    def read_all():
        for piece in read(state):
            if "some" in piece:
                threading.Thread(target=interrupt).start()

    with pytest.raises(KeyboardInterrupt):
        read_all()
    wait_for_no_sessions(backend)
    assert isinstance(state.error().__cause__, plait.Aborted)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_dropped_async_state_ends_the_program(backend, endless, kind):
    async def main():
        async for piece in (await endless[kind].arun(stream=True)).stream("x"):
            assert piece == "some"
            gc.collect()
            assert backend.scheduler.open_sessions() == 1
            break
        while backend.scheduler.open_sessions():
            gc.collect()
            await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("name", ["x", None])
def test_cancelled_reader_of_a_stream_ends_the_program(backend, endless, kind, name):
    async def main():
        state, has_begun = await endless[kind].arun(stream=True), asyncio.Event()

        async def read():
            async for piece in state.stream(name):
                if piece == "some":
                    has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        task.cancel()
        while backend.scheduler.open_sessions():
            await asyncio.sleep(0.01)
        return await state.error()

    assert isinstance(asyncio.run(main()).__cause__, plait.Aborted)


def test_a_read_holds_the_state(backend):
    backend.script(("p", "text"))

    @plait.function
    async def program(s):
        s += "p" + gen("x")

    async def main():
        return await (await program.arun(stream=True))["x"]

    assert asyncio.run(main()) == "text"
