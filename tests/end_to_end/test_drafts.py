"""Drafts change no token of the embedded model: greedy and sampled, constrained and in branches."""

from __future__ import annotations

import pytest

import plait
from plait import gen
from plait.constrained import JsonSchema
from plait.runtime.sampling_params import sampling_params

SCHEMA = JsonSchema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "city": {"enum": ["Lisbon", "Oslo"]}, "age": {"type": "integer"}},
        "required": ["name", "city", "age"],
    }
)
RECORDS = ["Ada Lindqvist, 41, of Oslo", "Boris Okafor, 37, of Lisbon", "Ada Lindqvist, 29, of Oslo"]


@pytest.fixture(scope="module")
def without_drafts():
    with plait.Engine(deterministic=True, drafts=(), max_pages=600) as engine:
        yield engine


def outputs(engine, **options):
    """The tokens and logprobs of each record, and the accepted drafts of all."""
    found, num_drafted = [], 0
    for record in RECORDS:
        session = engine.client.open_session()
        session.append(f"Record: {record}.\nAs JSON: ")
        result = session.generate(sampling_params(max_tokens=40, **options), SCHEMA).result()
        session.close()
        found.append((result.token_ids, result.logprobs))
        num_drafted += result.usage.drafted_tokens
    return found, num_drafted


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.0, "logprobs": True, "frequency_penalty": 0.3},
    ],
)
def test_constrained_outputs_equal_those_without_drafts(exact, without_drafts, options):
    drafted, num_drafted = outputs(exact, **options)
    assert drafted == outputs(without_drafts, **options)[0]
    assert num_drafted > 5


def test_branches_equal_those_without_drafts(exact, without_drafts):
    @plait.function
    def write(s):
        s += "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n"
        branches = s.fork(3)
        branches += gen("code", max_tokens=24)
        branches.join()

    options = {"temperature": 0.5, "seed": 7}
    state, plain = (write.run(backend=engine, **options) for engine in (exact, without_drafts))
    assert state["code"] == plain["code"]
