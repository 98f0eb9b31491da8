"""The table of sampling parameters and what is derived from it: request structs, errors, and lists in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.lang.sampling_options import GEN_SAMPLING_KEYWORDS
from plait.runtime.sampling_params import NAMES, PARAMS, SamplingParams
from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation.sampling_fields import checked_sampling_params
from plait.runtime.server.protocols.anthropic.request import MessagesRequest
from plait.runtime.server.protocols.ollama.request import OllamaChatRequest, OllamaOptions
from plait.runtime.server.protocols.openai.chat_request import ChatRequest
from plait.runtime.server.protocols.openai.completions import CompletionRequest
from plait.runtime.server.protocols.openai.responses.types import ResponsesRequest
from plait.runtime.server.protocols.programs.types import Gen, ProgramSamplingFields
from plait.runtime.server.protocols.sglang.types import GenerateRequest, SglangSamplingParams

DOCS = Path(__file__).parents[3] / "docs"
REQUESTS = {
    "openai": [ChatRequest],
    "responses": [ResponsesRequest],
    "anthropic": [MessagesRequest],
    "ollama": [OllamaOptions, OllamaChatRequest],
    "sglang": [SglangSamplingParams, GenerateRequest],
    "programs": [Gen],
}


@pytest.mark.parametrize("protocol", REQUESTS)
def test_requests_have_all_parameters_of_their_protocol(protocol):
    fields = {name for struct in REQUESTS[protocol] for name in struct.__struct_fields__}
    assert not set(NAMES[protocol].values()) - fields


def test_programs_may_default_every_parameter_but_complete():
    assert set(ProgramSamplingFields.__struct_fields__) == {*NAMES["programs"].values(), "n", "same_seed"}


def test_completions_have_the_parameters_of_chat():
    assert set(NAMES["openai"].values()) - set(CompletionRequest.__struct_fields__) == {"top_logprobs"}


def test_parameters_have_a_description_and_known_protocols():
    assert list(PARAMS) == list(SamplingParams.__struct_fields__)
    assert all(param.doc for param in PARAMS.values())
    assert set(NAMES) == {*REQUESTS, "gen", "openai_client", "anthropic_client"}
    assert all(len(set(names.values())) == len(names) for names in NAMES.values())


NUMBERS = [
    (protocol, field) for protocol in ("gen", *REQUESTS) for field in NAMES[protocol] if PARAMS[field].high is not None
]


@pytest.mark.parametrize(("protocol", "field"), NUMBERS)
def test_errors_have_the_protocols_name(protocol, field):
    name = NAMES[protocol][field]
    with pytest.raises(ApiError) as caught:
        checked_sampling_params(protocol, path="part", **{field: PARAMS[field].high + 1})
    assert caught.value.param == f"part.{name}"
    assert caught.value.message.startswith(f"{name} must be ")


@pytest.mark.parametrize(("page", "protocols"), [("programs-api.md", ["programs"]), ("protocols.md", [*REQUESTS])])
def test_docs_name_every_parameter(page, protocols):
    text = (DOCS / page).read_text()
    assert not {name for protocol in protocols for name in NAMES[protocol].values() if f"`{name}" not in text}


def test_gen_has_the_keywords_of_the_table():
    assert set(GEN_SAMPLING_KEYWORDS) == set(NAMES["gen"].values())
