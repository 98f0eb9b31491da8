"""Random straight-line programs on the scripted backend, alone, in a batch, streamed, async, compiled and over HTTP.

tests/end_to_end/test_compiled.py does the same with a model, a few times; this does it often.
"""

from __future__ import annotations

import zlib

import httpx
import pytest
from hosting import hosted
from hypothesis import HealthCheck, given, settings
from scripted import ScriptedBackend
from straight_programs import check_all_ways, programs

from plait.constrained.specs import Choices
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings


@pytest.fixture(scope="module")
def backend():
    """Its answers hang on all of the prompt, and on nothing else."""
    scripted = ScriptedBackend()
    scripted.scheduler.keep_requests = False

    def answer(prompt, request):
        number = zlib.crc32(prompt.encode())
        if isinstance(request.constraint, Choices):
            return request.constraint.choices[number % 2]
        return ("ab", "c")[number % 2] if request.constraint else f" <{number % 1000}>"

    scripted.scheduler.answer = answer
    scripted.scheduler.pick = lambda prompt, choices: zlib.crc32(prompt.encode()) % len(choices)
    yield scripted
    scripted.shutdown()


@pytest.fixture(scope="module")
def server(backend):
    with hosted(create_app(backend, server_settings())) as address, httpx.Client(base_url=address) as client:
        yield client


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs())
def test_any_straight_line_program_gives_the_same_however_it_is_run(backend, server, steps):
    check_all_ways(steps, backend, server, temperature=0, max_tokens=6)
