"""Penalties, bias, logprobs and scores in steps of a delayed device, compared with the sampler of the host.

Every run checks the integrity of the page pool after each step. No step may need the host-driven path.
"""

from __future__ import annotations

import pytest
import torch
import triton_device as kernel_device
from delayed_device import DelayedStream
from engine_runs import CPU, MODELS, WORDS, arrivals_of, device_runners, run
from fake_engine import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from synchronous_stream import ImmediateStream
from tiny_hf_models import randomized, runner

from plait.kernels.triton.operators import triton_kernels
from plait.runtime.call_reports import decode_logprobs
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.gpu_sampler import AdjustmentSlots
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.messages import Append, Close, Embed, Fork, Generate, Open, Select
from plait.runtime.sampling_params import sampling_params


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return device_runners(tmp_path_factory.mktemp("tiny"))


class DeviceOnly(GpuStepLauncher):
    """Fails where a step would take the host-driven path."""

    def launch(self, batch, *, overlapped):
        step = super().launch(batch, overlapped=overlapped)
        assert overlapped or step is not None
        return step


def run_on_device(runner, arrivals, progress_probability=0.0, rows=6, capture=True, num_slots=0, pooling="last"):
    """Returns the outcomes and the launcher. `num_slots`: of the penalties; 0: one for each row."""
    steps = DeviceOnly(runner, rows, DelayedStream(progress_probability, 3), capture)
    if num_slots:
        slot_bytes = 8 * VOCAB + 4 * (VOCAB // 32)
        steps.sampling.adjustments = AdjustmentSlots(
            rows, VOCAB, steps.stream, runner.kernels.fused.count_tokens, num_slots * slot_bytes
        )
        assert steps.sampling.adjustments.num_slots == min(num_slots, rows)
    outcomes = run(runner, arrivals, steps, rows=rows, pooling=pooling)
    return outcomes, steps


def numbers_of(logprobs):
    return [(entry.token_id, entry.logprob, *entry.top) for entry in logprobs or ()]


def assert_same_logprobs(ours, expected):
    ours, expected = numbers_of(ours), numbers_of(expected)
    assert [(token, *(other for other, _ in top)) for token, _, *top in ours] == [
        (token, *(other for other, _ in top)) for token, _, *top in expected
    ]
    for (_, logprob, *top), (_, other, *other_top) in zip(ours, expected, strict=True):
        assert logprob == pytest.approx(other, abs=1e-4)
        assert [value for _, value in top] == pytest.approx([value for _, value in other_top], abs=1e-4)


def assert_same(outcomes, expected):
    assert outcomes.keys() == expected.keys()
    for call, outcome in expected.items():
        ours = outcomes[call]
        assert ours.tokens == outcome.tokens, call
        assert type(ours.end) is type(outcome.end), call
        assert getattr(ours.end, "reason", None) == getattr(outcome.end, "reason", None), call
        assert_same_logprobs(ours.logprobs, outcome.logprobs)
        ours_of_prompt, other_of_prompt = (getattr(end, "prompt_logprobs", None) for end in (ours.end, outcome.end))
        assert_same_logprobs(decode_logprobs(ours_of_prompt or ()), decode_logprobs(other_of_prompt or ()))
        choice, other = getattr(ours.end, "choice", None), getattr(outcome.end, "choice", None)
        assert (choice is None) == (other is None)
        if choice is not None:
            assert choice.index == other.index
            assert choice.scores == pytest.approx(other.scores, abs=1e-4)


params = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([0, 2, 5, 11, 18]),
        "temperature": st.sampled_from([0.0, 0.9, 1.5]),
        "seed": st.integers(0, 2**63 - 1),
        "ignore_eos": st.booleans(),
    },
    optional={
        "top_k": st.integers(1, 9),
        "top_p": st.just(0.8),
        "frequency_penalty": st.sampled_from([-1.5, 0.7]),
        "presence_penalty": st.sampled_from([-1.0, 1.9]),
        "repetition_penalty": st.sampled_from([0.6, 1.8]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 3.0]), min_size=1),
        "logprobs": st.just(True),
        "top_logprobs": st.sampled_from([1, 5, 30]),
        "prompt_logprobs_from": st.integers(0, 9),
        "min_tokens": st.just(2),
        "stop": st.sampled_from(["a", "t"]),
    },
)
programs = st.fixed_dictionaries(
    {
        "at": st.integers(0, 20),
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=30),
        "calls": st.lists(params, min_size=1, max_size=2),
        "constraint": st.sampled_from([None, None, WORDS]),
        "end": st.sampled_from(["close", "fork", "select", "embed"]),
    }
)


def with_consistent(fields, constraint):
    fields = {k: v for k, v in fields.items() if constraint is None or k != "stop"}
    if not fields.get("logprobs") and fields.get("prompt_logprobs_from") is None:
        fields.pop("top_logprobs", None)
    fields["max_tokens"] = max(fields["max_tokens"], fields.get("min_tokens", 0), int(constraint is not None))
    return fields


def messages_of(number, program):
    call, at, constraint = 100 * number, program["at"], program["constraint"]
    sent = [Open(number), Append(number, program["prompt"])]
    for fields in program["calls"]:
        sent.append(Generate(number, call, sampling_params(**with_consistent(fields, constraint)), constraint))
        call += 1
    if program["end"] == "fork":
        children = [1000 + number, 2000 + number]
        fields = with_consistent(program["calls"][0], None)
        sent.append(Fork(number, children))
        sent += [Generate(child, 90 + 10 * child, sampling_params(**fields)) for child in children]
    elif program["end"] == "select":
        sent.append(Select(number, call, [[1, 2, 4], [3], [1, 5]], top_logprobs=2))
    elif program["end"] == "embed":
        sent.append(Embed(number, call))
    else:
        sent.append(Close(number))
    return [(at, message) for message in sent]


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(programs, min_size=1, max_size=6),
    rows=st.integers(1, 6),
    progress_probability=st.sampled_from([0.0, 0.4, 1.0]),
    capture=st.booleans(),
    short=st.booleans(),
    num_slots=st.sampled_from([0, 0, 1, 2]),
    pooling=st.sampled_from(["last", "mean"]),
)
def test_random_programs_equal_the_sampler_of_the_host(
    model, work, rows, progress_probability, capture, short, num_slots, pooling
):
    arrivals = [message for number, program in enumerate(work) for message in messages_of(number, program)]
    outcomes, _ = run_on_device(
        model.short if short else model.device, arrivals, progress_probability, rows, capture, num_slots, pooling
    )
    assert_same(outcomes, run(model.plain, arrivals, rows=rows, pooling=pooling))


ALL = dict(
    frequency_penalty=0.9,
    presence_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={7: 2.5, 9: -100.0},
    logprobs=True,
    top_logprobs=3,
    ignore_eos=True,
)


def one_such_call(n=40):
    """Three plain calls, and beside them one with all parameters and one Select."""
    arrivals = [(0, message) for _, message in arrivals_of(3, n=n)]
    arrivals += [(5, Open(9)), (5, Append(9, [1, 2, 3]))]
    all_params = sampling_params(max_tokens=n - 10, temperature=0.0, prompt_logprobs_from=1, **ALL)
    arrivals += [(5, Generate(9, 9, all_params)), (5, Close(9))]
    return arrivals + [(9, Open(8)), (9, Append(8, [2, 2])), (9, Select(8, 8, [[1, 2], [3]])), (9, Close(8))]


def test_a_call_with_penalties_and_logprobs_keeps_overlap_and_graphs_for_its_batch(model):
    arrivals = one_such_call()
    outcomes, steps = run_on_device(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 35
    assert steps.num_graph_replays > 35


def test_a_select_over_several_overlapped_steps_ends_with_its_last_scores(model):
    """The last part of a choice is launched before the scores of the part before are committed."""
    arrivals = [(0, message) for _, message in arrivals_of(2, n=40)]
    choices = [[1 + i % 7 for i in range(60)], [2 + i % 5 for i in range(70)]]
    arrivals += [(6, Open(8)), (6, Append(8, [2] * 50)), (6, Select(8, 8, choices, top_logprobs=2)), (6, Close(8))]
    prompt_logprobs = sampling_params(max_tokens=3, temperature=0.0, prompt_logprobs_from=0)
    arrivals += [(7, Open(9)), (7, Append(9, [3] * 80)), (7, Generate(9, 9, prompt_logprobs)), (7, Close(9))]
    outcomes, steps = run_on_device(model.device, arrivals)
    assert_same(outcomes, run(model.plain, arrivals))
    assert steps.num_overlapped > 35


WHOLE = {"exact": {"exact": True}, "particles": {"particles": 5}}


def whole_value_calls(kind, at, count, **fields):
    """Calls that draw one of WORDS as a whole, one session each; half of them share a prompt."""
    arrivals = []
    for i in range(count):
        params = sampling_params(max_tokens=24, temperature=1.2, seed=70 + i, **WHOLE[kind], **fields)
        prompt = [3, 2, 1] if i % 2 else [1 + i % 3] * (2 + i)
        messages = Open(50 + i), Append(50 + i, prompt), Generate(50 + i, 50 + i, params, WORDS), Close(50 + i)
        arrivals += [(at + 2 * i, message) for message in messages]
    return arrivals


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(WHOLE)),
    fields=st.sampled_from([{}, {"top_k": 40}, {"logit_bias": {9: 2.0}}]),
    count=st.integers(1, 4),
    others=st.integers(0, 3),
    rows=st.integers(1, 8),
    progress_probability=st.sampled_from([0.0, 0.4, 1.0]),
    capture=st.booleans(),
    short=st.booleans(),
)
def test_values_drawn_as_a_whole_equal_those_of_the_host(
    model, kind, fields, count, others, rows, progress_probability, capture, short
):
    arrivals = arrivals_of(others, n=20) + whole_value_calls(kind, 2, count, **fields)
    device = model.short if short else model.device
    outcomes, _ = run_on_device(device, arrivals, progress_probability, rows, capture)
    expected = run(model.plain, arrivals, rows=rows)
    assert_same(outcomes, expected)
    for call in range(50, 50 + count):
        assert logprob_of_value(outcomes[call].end) == pytest.approx(logprob_of_value(expected[call].end), abs=1e-4)


def logprob_of_value(end):
    """None for a call that failed, in which all particles ended."""
    info = getattr(end, "exact", None) or getattr(end, "particles", None)
    return info.logprob if info is not None else None


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_a_value_drawn_as_a_whole_keeps_overlap_and_graphs_for_its_batch(model, kind):
    arrivals = [(0, message) for _, message in arrivals_of(3, n=40)] + whole_value_calls(kind, 5, 2)
    outcomes, steps = run_on_device(model.device, arrivals, rows=16)
    assert_same(outcomes, run(model.plain, arrivals, rows=16))
    assert steps.num_overlapped > 35
    assert steps.num_graph_replays > 35


def test_only_changes_are_uploaded(model):
    """One slot is filled, and each token of the output is counted once."""
    _, steps = run_on_device(model.device, one_such_call())
    adjustments = steps.sampling.adjustments
    assert adjustments.num_filled == 1
    assert adjustments.num_counted == 29  # of 30 tokens: the last one is not followed by a draw


def test_more_rows_with_penalties_than_slots(model):
    fields = {name: value for name, value in ALL.items() if "logprobs" not in name}
    arrivals = arrivals_of(2, n=12)
    for i in range(5):
        changed = {"frequency_penalty": 0.3 * i, "logit_bias": {10 + i: 4.0}}
        gen = sampling_params(max_tokens=12, temperature=0.0, **fields | changed)
        arrivals += [(i, message) for message in (Open(20 + i), Append(20 + i, [3, i]), Generate(20 + i, 20 + i, gen))]
    expected = run(model.plain, arrivals, rows=7)
    for num_slots in (1, 2, 5):
        outcomes, steps = run_on_device(model.device, arrivals, rows=7, num_slots=num_slots)
        assert_same(outcomes, expected)
        assert (steps.sampling.adjustments.num_filled > 5) == (num_slots < 5)


def test_all_parameters_on_the_triton_operators(tmp_path):
    randomized(MODELS["Llama"]()).save_pretrained(tmp_path)
    plain = runner(tmp_path)
    config = engine_config(device=str(kernel_device.DEVICE), dtype="float32", max_pages=256, max_batch_tokens=24)
    ours = TorchRunner(config, tmp_path, kernels=triton_kernels(torch.float32))
    arrivals = [(0, Open(1)), (0, Append(1, [1, 2, 3])), (0, Fork(1, [2]))]
    fields = ALL | {"prompt_logprobs_from": 1, "max_tokens": 4}
    arrivals += [(0, Generate(1, 1, sampling_params(temperature=0.0, **fields)))]
    arrivals += [(0, Select(2, 2, [[1, 2], [3]], top_logprobs=2))]
    steps = DeviceOnly(ours, 2, ImmediateStream(CPU))
    assert_same(run(ours, arrivals, steps, rows=2), run(plain, arrivals, rows=2))
