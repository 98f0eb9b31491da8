"""The device's sampler supports all sampling parameters of the table; one that is new there needs the host."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Annotated, Any, cast

import pytest

from plait.runtime.batch.request import GenerationRequest
from plait.runtime.executor.gpu.gpu_sampler import ON_DEVICE, can_sample_on_device
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.sampling_table import SAMPLER_STAGES, Param, fields_of_stages, params_of

OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 1.0},
    "logprobs": True,
    "exact": True,
    "particles": 4,
}


# The device keeps counts of all tokens, from which none is taken away; its filters keep the likeliest tokens.
HOST_ONLY = {"repeat_last_n": 64, "typical_p": 0.7}


def is_on_device(params: SamplingParams) -> bool:
    return can_sample_on_device(cast(GenerationRequest, SimpleNamespace(params=params)))


@pytest.mark.parametrize("name", fields_of_stages(SamplingParams, *SAMPLER_STAGES))
def test_parameters_of_the_sampler(name: str) -> None:
    assert is_on_device(SamplingParams())
    if name in HOST_ONLY:
        assert not is_on_device(SamplingParams(**{name: HOST_ONLY[name]}))
        return
    assert is_on_device(SamplingParams(**{name: OTHER_VALUES[name]}))
    assert name in ON_DEVICE


def test_parameters_of_the_scheduler_do_not_matter() -> None:
    assert is_on_device(SamplingParams(max_tokens=3, stop=("x",), ignore_eos=True, timeout_s=1.0))


class WithFilter(SamplingParams, frozen=True, kw_only=True):
    """The table with a filter that no sampler knows."""

    tail_free_z: Annotated[float, Param("A made-up filter", stage="filter")] = 1.0


class WithEnd(SamplingParams, frozen=True, kw_only=True):
    """The table with a stop condition that no sampler knows."""

    max_lines: Annotated[int, Param("A made-up limit", stage="output")] = 0


class WithoutParam(SamplingParams, frozen=True, kw_only=True):
    """The table with a field that has no entry."""

    tail_free_z: float = 1.0


def test_a_new_filter_is_sampled_on_the_host() -> None:
    assert is_on_device(WithFilter()) and not WithFilter().is_filtered
    assert not is_on_device(WithFilter(tail_free_z=0.5)) and WithFilter(tail_free_z=0.5).is_filtered
    assert WithFilter(top_k=3).is_filtered and is_on_device(WithFilter(top_k=3))


def test_a_new_stop_condition_is_sampled_on_the_device() -> None:
    assert is_on_device(WithEnd(max_lines=3)) and not WithEnd(max_lines=3).is_filtered


def test_a_parameter_without_an_entry_or_without_a_stage_is_an_error() -> None:
    with pytest.raises(TypeError, match="'tail_free_z' needs one Param"):
        params_of(WithoutParam)
    with pytest.raises(TypeError, match="stage"):
        Param("A made-up filter")  # type: ignore[call-arg]
    assert next(field for field in fields(Param) if field.name == "stage").default is MISSING


def test_properties_follow_the_stages() -> None:
    assert SamplingParams(temperature=0.0).needs_only_argmax
    assert not SamplingParams(temperature=0.0, logprobs=True).needs_only_argmax
    assert not SamplingParams(temperature=0.0, logit_bias={1: 1.0}).needs_only_argmax
    assert SamplingParams(presence_penalty=0.1).has_penalties_or_bias and not SamplingParams().has_penalties_or_bias
