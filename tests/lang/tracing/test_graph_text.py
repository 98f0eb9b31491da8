"""A compiled graph as text and as a Mermaid diagram."""

from __future__ import annotations

import linecache
import re

import compiled_programs
from compiled_programs import review

import plait
from plait import gen


def test_text_has_the_keywords_of_gen():
    @plait.function
    def program(s):
        s += "p" + gen("a", logprob_start_len=0, return_logprob=True, top_logprobs_num=2, timeout=3)

    text = str(program.compile())
    keywords = ("logprob_start_len=0", "return_logprob=true", "top_logprobs_num=2", "timeout=3.0")
    assert set(keywords) <= set(text.split()), text


def test_text_lists_turns_calls_and_forks():
    lines = str(review.compile(temperature=0)).splitlines()
    head = re.fullmatch(r"program review\(text\) at .*compiled_programs\.py:(\d+)", lines[0])
    source = linecache.getlines(compiled_programs.__file__)
    assert head and source[int(head[1]) - 1 :][:2] == ["@plait.function\n", "def review(s, text, k=2):\n"]
    assert [line.strip() for line in lines[1:]] == [
        "defaults temperature=0.0",
        *("system", '"You are terse."'),
        *("user", '"A review: "', "text", '"\\nWhat does it say?"'),
        *("assistant", 'gen summary max_tokens=40 stop=["\\n"]'),
        *("user", '"Is "', "s['summary']", '" positive?"'),
        *("assistant", 'select verdict ["yes", "no"]'),
        "fork into 2",
        *("branch 0", "user", '"And the price?"', "assistant", "gen detail max_tokens=24"),
        *("branch 1", "user", '"And the quality?"', "assistant", "gen detail max_tokens=24"),
        "join variables",
        *("user", '"Sum up: "', "s['detail'][0]", '"; "', "s['detail'][1]"),
        *("assistant", "gen end"),
    ]


def test_mermaid_draws_forks_joins_and_variable_edges():
    diagram = review.compile("nice").mermaid()
    lines = diagram.splitlines()
    assert lines[0] == "flowchart TD"
    (forked,) = re.findall(r"(n\d+)\{\{\"fork into 2\"\}\}", diagram)
    (joined,) = re.findall(r"(n\d+)\{\{\"join variables\"\}\}", diagram)
    assert diagram.count(f"{forked} --> ") == 2 and diagram.count(f" --> {joined}") == 2
    first, second = re.findall(r"(n\d+)\(\"gen detail max_tokens=24\"\)", diagram)
    assert f'{first} -. "detail" .-> ' in diagram and f'{second} -. "detail" .-> ' in diagram
    assert re.search(r'n\d+ -\. "summary" \.-> n\d+', diagram)
    boxes = [line for line in lines if re.match(r"  n\d+[\[({]", line)]
    assert boxes and all(re.fullmatch(r"  n\d+[\[({/]+\"[^\"<>`]*\"[\])}/]+", line) for line in boxes)


def test_mermaid_draws_edges_of_open_arguments():
    assert '  start -. "text" .-> n' in review.compile().mermaid()
    assert "start -." not in review.compile("nice").mermaid()
