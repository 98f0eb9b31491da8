"""A gen object as the key of its own typed value, at run time and for mypy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait import gen

ROOT = Path(__file__).parents[3]
AGE = gen("age", type=int)


@plait.function
def reads_by_gen_object(s):
    s += "I am " + AGE + " years old."
    return s[AGE] + 1


def test_gen_object_reads_its_value(backend):
    backend.script(default="41")
    state = reads_by_gen_object.run()
    assert state.ret_value == 42 and state[AGE] == 41 and state.text_of(AGE) == "41"


def test_gen_object_refuses_a_value_of_another_gen(backend):
    backend.script(default="41")
    state = reads_by_gen_object.run()
    with pytest.raises(plait.InputError, match="is not the value of this gen"):
        state[gen("age", type=float)]
    with pytest.raises(plait.MissingVariable, match="no variable 'ag'"):
        state[gen("ag", type=int)]
    with pytest.raises(plait.InputError, match="without a name"):
        state[gen(type=int)]
    state["age"] = 3
    with pytest.raises(plait.InputError, match=r"read s\['age'\]"):
        state[AGE]


def test_mypy_infers_the_type_of_a_value(tmp_path):
    (tmp_path / "typed_program.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom typing import Literal\nimport plait\n\n"
        "@dataclass\nclass Person:\n    name: str\n\n"
        "@plait.function\ndef program(s: plait.ProgramState) -> None:\n"
        "    p = plait.gen('p', type=Person, temperature=0.5)\n    s += 'x'\n    s += p\n    reveal_type(s[p])\n"
        "    reveal_type(s[plait.gen('l', 16, type=list[int])])\n"
        "    reveal_type(s[plait.gen('c', type=Literal['a'])])\n    reveal_type(s['p'])\n"
        "    reveal_type(plait.gen('t', max_tokens=3))\n    s[p].nome\n    plait.gen('t', max_tokens='3')\n"
    )
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    completed = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), str(tmp_path / "typed_program.py")],
        env={"PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    revealed = re.findall(r"typed_program.*(?:Revealed type is|error:) (.*)", completed.stdout)
    assert revealed[0] == '"typed_program.Person"', completed.stdout + completed.stderr
    assert revealed[1] in ('"builtins.list[builtins.int]"', '"list[int]"')
    assert revealed[2:4] == ['"Any"', '"Any"']
    assert "Expr" in revealed[4]
    assert '"Person" has no attribute "nome"' in revealed[5] and "gen" in revealed[6] and len(revealed) == 7
