"""What mypy finds in programs: wrong arguments of `run`, `compile` and batches, misspelled keywords of `gen`.

Each line of BAD that ends with a comment `# E: text` has an error with that text; no other line has one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from plait.lang.gen_keywords import RegexGenKeywords, RunKeywords, TypedGenKeywords
from plait.lang.sampling_options import GEN_SAMPLING_KEYWORDS, SAMPLING_KEYWORDS

ROOT = Path(__file__).parents[2]
HEADER = """
from __future__ import annotations

import plait
from plait import ProgramState, gen, gen_int, select


@plait.function
def ask(s: ProgramState, question: str, times: int = 1) -> None:
    s += question + gen("x", temperature=0.5, stop=["a"]) + gen("n", type=int, retries=2, temperature=0)


@plait.function
async def later(s: plait.AsyncState, question: str) -> None:
    s += question


@plait.function
def untyped(s, question):  # type: ignore[no-untyped-def]
    s += question


@plait.function
def many(s: ProgramState, /, *words: str, **others: int) -> None:
    s += "".join(words)


@plait.function
def options(s: ProgramState, **others: int) -> None:  # `s` could be one of them
    s += str(others)


class Agent:
    @plait.function
    def answer(self, s: ProgramState, question: str) -> None:
        s += question
"""
STAR = """
from plait import *

numbers: list[int] = list(map(int, ["1"]))  # Python's own
greeting = user("hello") + gen_string("answer")
"""
GOOD = """
ask.run("why", temperature=0, seed=7, stream=True, budget=plait.Budget(tokens=5))
ask.run(question="why", times=2)["x"]
ask("why", temperature=0)
untyped.run(5, top_p=1)
many.run("a", "b", c=3, max_tokens=4)
options.run(c=3)
Agent().answer.run("why", temperature=0)
ask.run_batch([{"question": "a"}, {"question": "b", "times": 2}], temperature=0, progress_bar=True)
items = [{"question": "a"}]
ask.run_batch(items)
ask.compile(temperature=0).run(question="why")
ask.compile("why", times=3)
ask.bind(times=2).run("why")
gen("x", max_tokens=3, regex="a", logit_bias={1: 2.0})
gen_int("i", temperature=0)
select("c", ["a", "b"], timeout=3)
select("b", bool)
number: int = plait.extract(int, "x", temperature=0, retries=1)
numbers: list[int] = plait.extract(int, ["x"], sampling={"seed": 1})
label: str = plait.classify("x", ["a", "b"])
label = plait.classify("x", {"a": "the first"})
moods: list[bool] = plait.classify(["x"], bool)
answers: list[str] = plait.ask(["x"], instructions="Be short.", max_tokens=5)
words: dict[str, object] = ask.run("why").variables | ask.run("why").arguments


async def main() -> None:
    await later.arun("why", seed=1)
    calls: int = (await (await later.arun("why", stream=True)).usage).calls
    await later.arun_batch([{"question": word} for word in ("a", "b")], max_concurrency=2)
    (await later.arun("why", stream=True)).stream("x")
"""
BAD = """
ask.run(5)  # E: incompatible type "int"; expected "str"
ask.run("why", nosuch=3)  # E: Unexpected keyword argument "nosuch"
ask.run()  # E: Missing positional argument "question"
ask.run("why", "often")  # E: incompatible type "str"; expected "int"
ask.run(5, temperature=0)  # E: incompatible type "int"; expected "str"
ask.run("why", temperature="hot")  # E: incompatible type "str"; expected "float | None"
ask.run("why", temperture=0)  # E: Unexpected keyword argument "temperture"
ask.run("why", stream=1)  # E: incompatible type "int"; expected "bool"
many.run("a", 3)  # E: incompatible type "int"; expected "str"
Agent().answer.run(5)  # E: incompatible type "int"; expected "str"
ask.run_batch([{"question": 5}])  # E: expression has type "int"
ask.run_batch([{"qestion": "a"}])  # E: Expected TypedDict key "question"
ask.run_batch([{"question": "a"}], temperture=0)  # E: No overload variant of "run_batch"
ask.compile(nosuch=3)  # E: Unexpected keyword argument "nosuch"
ask.compile(times="x")  # E: incompatible type "str"; expected "int"
ask.bind(times="x")  # E: incompatible type "str"; expected "int"
ask.bind(nosuch=1)  # E: Unexpected keyword argument "nosuch"
gen("x", temperture=1)  # E: No overload variant of "gen"
gen("x", type=int, temperture=1)  # E: No overload variant of "gen"
gen("x", max_tokens="many")  # E: No overload variant of "gen"
gen_int("x", temperture=1)  # E: Unexpected keyword argument "temperture"
select("c", ["a"], timeot=1)  # E: No overload variant of "select"
plait.ask("x", temprature=1)  # E: No overload variant of "ask"
wrong: str = plait.extract(int, "x")  # E: Incompatible types in assignment


async def main() -> None:
    await later.arun(5)  # E: No overload variant of "arun"
    await later.arun_batch([{"question": word} for word in (1, 2)])  # E: "int"
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of the two modules, as (module, line, message), found by one run of mypy.

    As for a user whose programs stand beside the clone: mypy finds the installed package, not the folder `plait`.
    """
    folder = tmp_path_factory.mktemp("typed")
    (folder / "good_programs.py").write_text(HEADER + GOOD)
    (folder / "bad_programs.py").write_text(HEADER + BAD)
    (folder / "star_programs.py").write_text(STAR)
    (folder / "plait").symlink_to(ROOT)
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    completed = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), *map(str, sorted(folder.glob("*.py")))],
        env={"PATH": "/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=230,
    )
    found = re.findall(r"(good|bad|star)_programs\.py:(\d+): error: (.*)", completed.stdout)
    assert found, completed.stdout + completed.stderr
    return [(module, int(line), message) for module, line, message in found]


def test_correct_programs_have_no_errors(errors):
    assert [error for error in errors if error[0] != "bad"] == []


def test_wrong_arguments_are_errors_in_their_lines(errors):
    lines = (HEADER + BAD).splitlines()
    expected = {number: line.split("# E: ")[1] for number, line in enumerate(lines, 1) if "# E: " in line}
    found = {line: message for module, line, message in errors if module == "bad"}
    assert found.keys() == expected.keys()
    others = [(lines[line - 1], found[line]) for line, text in expected.items() if text not in found[line]]
    assert others == []


def test_types_name_all_keywords():
    assert set(get_type_hints(RunKeywords)) == {*SAMPLING_KEYWORDS, "sampling"}
    of_gen = {*GEN_SAMPLING_KEYWORDS, "same_seed", "return_text_in_logprobs"}
    assert set(get_type_hints(TypedGenKeywords)) == of_gen - {"max_tokens", "min_tokens"} | {
        "retries",
        "think",
        "think_tokens",
        "draft_then_constrain",
        "draft_tokens",
        "adapter",
    }
    assert set(get_type_hints(RegexGenKeywords)) == of_gen | {"n"}
