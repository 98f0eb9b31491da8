"""Meta info as an object: attributes, keys, copies, and the docstrings of the public exceptions beside it."""

from __future__ import annotations

import copy
import json
import typing

import pytest
from raised_errors import public_classes
from sample_programs import run_expression

import plait
from plait import gen, select
from plait.lang.batches.saved_values import ValueCodec
from plait.runtime.call_reports import Usage

AGE = gen("x", type=int)


def test_items_of_meta_info_are_attributes(backend):
    meta = run_expression(gen("x", return_logprob=True, top_logprobs_num=1)).get_meta_info("x")
    assert type(meta) is plait.GenMeta and isinstance(meta, dict)
    assert meta.finish_reason == meta["finish_reason"] == {"type": "stop", "matched": None}
    assert {name: getattr(meta, name) for name in meta} == dict(meta)
    assert meta.output_token_logprobs[0][2] == " " and meta.input_token_logprobs is None and meta.attempts is None
    with pytest.raises(AttributeError, match="no attribute 'cached_token'; it has finish_reason, prompt_tokens"):
        meta.cached_token  # noqa: B018
    assert json.loads(json.dumps(meta))["completion_tokens"] == meta.completion_tokens


def test_usage_is_printed_without_its_variables(backend):
    usage = run_expression(gen("x")).usage
    assert list(usage.by_variable) == ["x"]
    assert str(usage).startswith(f"{usage.prompt_tokens:,} prompt tokens: ") and "by_variable" not in repr(usage)


def test_meta_info_of_a_select(backend):
    meta = run_expression(select("x", ["ab", "c"])).get_meta_info("x")
    assert type(meta) is plait.SelectMeta
    assert meta.choices == ["ab", "c"] and meta.choice_scores == meta["choice_scores"]
    assert meta.unconditional_token_logprobs is None and meta.method is None


def test_meta_info_by_typed_gen(backend):
    backend.script(default="41")
    state = run_expression(AGE)
    assert state.get_meta_info(AGE) == state.get_meta_info("x")

    @plait.function
    def program(s):
        s += "p" + AGE
        s += f"{s.get_meta_info(AGE)['completion_tokens']}"

    assert program.compile().run().text() == "p412"


def test_copies_keep_the_class(backend):
    meta = run_expression(gen("x")).get_meta_info("x")
    codec = ValueCodec(lambda: None)
    for copied in (copy.copy(meta), copy.deepcopy(meta), codec.decode(json.loads(json.dumps(codec.encode(meta))))):
        assert copied == meta and type(copied) is plait.GenMeta and copied.prompt_tokens == meta.prompt_tokens


def test_attributes_are_documented_and_complete(backend):
    common = set(typing.get_type_hints(plait.CallMeta))
    assert common == {*Usage.__struct_fields__, "finish_reason"}
    for kind in (plait.CallMeta, plait.GenMeta, plait.SelectMeta):
        for name in kind.__annotations__:
            assert f"`{name}`" in kind.__doc__, name
    chosen = run_expression(select("x", ["ab", "c"], choices_method=plait.unconditional_likelihood_normalized))
    assert set(chosen.get_meta_info("x")) <= set(typing.get_type_hints(plait.SelectMeta))


@pytest.mark.parametrize("name", sorted(public_classes()))
def test_every_public_exception_has_a_docstring(name):
    kind = public_classes()[name]
    own = kind.__dict__.get("__doc__")
    assert own and own not in [parent.__doc__ for parent in kind.__mro__[1:]]
    assert own.strip().count(".") >= 1
