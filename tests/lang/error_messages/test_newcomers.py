"""Mistakes of people who come from other libraries: the error says what to write instead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import BaseModel

import plait
from plait import gen, select


@dataclass
class Town:
    name: str


class Person(BaseModel):
    name: str


@plait.function
def classify(s, text):
    s += text + select("kind", ["a", "b"])


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("response_model", "type="),
        ("num_beams", "plait.beam"),
        ("do_sample", "temperature=0"),
        ("guided_regex", "regex="),
        ("logprobs", "return_logprob=True"),
        ("grammar", "ebnf="),
    ],
)
def test_a_keyword_of_another_library_names_ours(keyword, advice):
    with pytest.raises(plait.InputError, match=f"gen.'x'. has no keyword '{keyword}': .*{advice}"):
        gen("x", **{keyword: 1})


def test_keywords_of_run_name_ours():
    with pytest.raises(plait.InputError, match="chat_template_kwargs"):
        classify.run("x", enable_thinking=False)
    with pytest.raises(plait.InputError, match="num_threads"):
        classify.run_batch([{"text": "x"}], max_workers=4)


def test_a_parameter_may_have_such_a_name(backend):
    @plait.function
    def schema_of(s, schema):
        s += schema

    assert schema_of.run(schema="x").text() == "x"
    with pytest.raises(plait.InputError, match="missing a required argument: 'schema', but got 'shema'"):
        schema_of.run_batch([{"shema": "x"}])


@pytest.mark.parametrize(("value", "name"), [(Town("Ulm"), "Town"), (Person(name="Ada"), "Person")])
def test_an_object_instead_of_its_type(value, name):
    with pytest.raises(plait.InputError, match=f"write type={name}, not an object of it"):
        gen("x", type=value)


def test_a_dataclass_as_json_schema():
    with pytest.raises(plait.InputError, match="write type=Town"):
        gen("x", json_schema=Town)


def test_a_type_in_a_function_that_names_itself():
    @dataclass
    class Node:
        following: "Node | None"  # noqa: UP037

    Node.__annotations__["following"] = "Node | None"
    with pytest.raises(plait.InputError, match="at the top level of a module"):
        gen("x", type=Node)


def test_text_as_backend():
    with pytest.raises(plait.InputError, match=r"write RuntimeEndpoint\('http://127.0.0.1:3'\)"):
        classify.run("x", backend="http://127.0.0.1:3")
    with pytest.raises(plait.InputError, match=r"write Runtime\('model.gguf'\)"):
        plait.set_default_backend("model.gguf")
    with pytest.raises(plait.InputError, match=r"create one: Runtime\(\.\.\.\)"):
        plait.set_default_backend(plait.Runtime)


def test_a_url_as_address():
    with pytest.raises(plait.InputError, match="RuntimeEndpoint"):
        plait.Runtime.connect("http://127.0.0.1:30000")


def test_resume_without_a_path(backend):
    with pytest.raises(plait.InputError, match="resume takes the path of a file"):
        classify.run_batch([{"text": "x"}], resume=True)


def test_arguments_of_partial_value_in_the_wrong_order():
    with pytest.raises(plait.InputError, match="a type and then a text"):
        plait.partial_value('{"name": "U', Town)
