"""`logit_bias` in compiled programs: run as a graph, printed, and as defaults of a request."""

from __future__ import annotations

import json

import msgspec
import pytest

import plait
from plait import gen
from plait.runtime.messages import Generate
from plait.runtime.server.errors import ApiError
from plait.runtime.server.protocols.programs.program_compiler import compile_program
from plait.runtime.server.protocols.programs.types import ProgramRequest

BIAS = {5: 1.5, 7: -100.0}


@plait.function
def biased(s):
    s += "p" + gen("a", logit_bias=BIAS) + gen("b")


def steps_on_the_server(request):
    return compile_program(msgspec.json.decode(json.dumps(request).encode(), type=ProgramRequest), 128).steps


def test_a_graph_runs_with_the_bias_of_its_gens(backend) -> None:
    biased.compile().run(backend=backend)
    assert [sent.sampling.logit_bias for sent in backend.scheduler.sent(Generate)] == [BIAS, {}]
    assert 'logit_bias={"5": 1.5, "7": -100.0}' in str(biased.compile())


def test_a_request_has_the_bias_of_gens_and_of_defaults() -> None:
    request = biased.compile(logit_bias={9: 2.0}).json()
    assert request["defaults"] == {"logit_bias": {"9": 2.0}}
    _, a, b = steps_on_the_server(request)
    assert (a.sampling.logit_bias, b.sampling.logit_bias) == (BIAS, {9: 2.0})


@pytest.mark.parametrize(("bias", "message"), [({"x": 1}, "are token ids"), ({"5": 101}, "from -100 to 100")])
def test_wrong_biases_are_refused_with_their_place(bias, message) -> None:
    request = {"program": [{"text": "p"}, {"gen": {"name": "a", "logit_bias": bias}}]}
    with pytest.raises(ApiError, match=message) as caught:
        steps_on_the_server(request)
    assert caught.value.param == "program[1].gen.logit_bias"
