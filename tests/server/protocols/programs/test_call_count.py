"""The calls that a program can have in flight at once, as admission counts them."""

from __future__ import annotations

import json

import pytest
from json_bodies import parse

from plait.runtime.server.protocols.programs.program_compiler import compile_program
from plait.runtime.server.protocols.programs.types import ProgramRequest

GEN, TEXT = {"gen": {}}, {"text": "a"}
SELECT = {"select": {"choices": ["a", "b"]}}


def gen(name, n=1):
    return {"gen": {"name": name, "n": n}}


def fork(*branches, join="gather"):
    return {"fork": {"branches": [list(branch) for branch in branches], "join": join}}


CASES = {
    "calls of one session run in order": ([GEN, SELECT, GEN], 1),
    "samples": ([gen("s", 4)], 4),
    "samples of an earlier gen may still run": ([gen("s", 4), gen("t", 3)], 6),
    "a var of a sample ends only that one": ([gen("s", 4), {"var": "s", "index": 2}, gen("t", 3)], 5),
    "a var of all samples": ([gen("s", 2), {"var": "s", "index": 0}, {"var": "s", "index": 1}, gen("t", 2)], 2),
    "a turn": ([{"role": "user", "content": [gen("s", 2), gen("t", 2)]}], 3),
    "branches": ([fork([GEN, GEN], [GEN], [SELECT])], 3),
    "branches without calls": ([GEN, fork([TEXT], [TEXT]), GEN], 1),
    "branches start after the calls before the fork": ([GEN, fork([GEN], [GEN])], 2),
    "samples before a fork run beside its branches": ([gen("s", 3), fork([GEN], [GEN])], 4),
    "the text after a fork goes on beside its branches": ([fork([GEN], [GEN]), GEN], 3),
    "two forks run side by side": ([fork([GEN], [GEN]), fork([GEN], [GEN], [GEN])], 5),
    "append waits for the branches": (
        [fork([GEN], [GEN], join="append"), fork([GEN], [GEN], [GEN], join="append"), GEN],
        3,
    ),
    "append does not wait for samples": ([fork([gen("s", 3)], [GEN], join="append"), GEN], 4),
    "a var of every branch's value": (
        [fork([gen("x")], [gen("x")]), {"var": "x", "index": 0}, {"var": "x", "index": 1}, GEN],
        2,
    ),
    "a var of a call that is not its session's last": (
        [fork([gen("x"), GEN], [gen("x")]), {"var": "x", "index": 0}, {"var": "x", "index": 1}, GEN],
        2,
    ),
    "nested forks multiply": ([fork(*[[fork(*[[gen("s", 2)]] * 3)]] * 4)], 24),
    "a branch and its forks": ([fork([fork([GEN], [GEN]), GEN], [GEN]), GEN], 5),
    "a branch that waits for a text before it": (
        [gen("s", 3), fork([{"var": "s", "index": 1}, {"var": "s", "index": 2}, fork([GEN], [GEN])], [GEN]), GEN],
        5,
    ),
    "a variable of the request": ([{"var": "v"}, {"var": "many", "index": 1}, gen("s", 2)], 2),
}


@pytest.mark.parametrize(("program", "most"), CASES.values(), ids=CASES)
def test_calls_in_flight(program, most):
    variables = {"v": "text", "many": ["one", "two"]}
    body = parse(json.dumps({"program": program, "variables": variables}).encode(), ProgramRequest)
    assert compile_program(body, 128).max_calls == most
