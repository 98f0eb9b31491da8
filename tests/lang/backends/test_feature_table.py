"""Every cell of the table in docs/backends.md, tried: a service takes what the table says, and refuses the rest before
anything is sent.

The chat APIs stand at an address where nobody listens: what is taken fails to reach it, what is refused does not try.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import fake_servers as servers
import pytest
from scripted_scheduler import ScriptedBackend

import plait
from plait import assistant, gen, select, system, user
from plait.lang.core.expressions import Expr

NOBODY = "http://127.0.0.1:9"
PAGE = Path(__file__).parents[3] / "docs" / "backends.md"


def look_up(word: str) -> str:
    """Looks a word up."""
    return word


def said(**options):
    return user("Q") + assistant(gen("x", **options))


def texts(s):
    forks = s.fork(2)
    forks += said(n=2)
    forks.join()


PROBES = {
    "turns": [said()],
    "system turns after other turns": [user("Q") + system("S") + assistant(gen("x"))],
    "plain text": ["Q" + gen("x")],
    "text before a gen in its turn": [user("Q") + assistant("It is " + gen("x"))],
    "forks, `n`": [texts],
    "`regex`, `json_schema`, `type`, sampled `choices`": [
        said(regex="[a-z]+"),
        said(json_schema={"type": "object"}),
        said(type=int),
        said(choices=["42", "b"], temperature=1.0),
    ],
    "`ebnf`": [said(ebnf='root ::= "42"')],
    "`lark`": [said(lark='start: "42"')],
    "`tools`": [said(tools=[look_up])],
    '`tools` with `tool_choice="auto"`': [said(tools=[look_up], tool_choice="auto")],
    "`select`": [user("Q") + assistant(select("x", ["a", "b"]))],
    "the other `choices_method`s": [
        user("Q") + assistant(select("x", ["a", "b"], choices_method=method))
        for method in (plait.greedy_token_selection, plait.unconditional_likelihood_normalized)
    ],
    "`stop`, `temperature`, `top_p`": [said(stop="."), said(temperature=0.5), said(top_p=0.5)],
    "`seed`, `frequency_penalty`, `presence_penalty`": [
        said(seed=1),
        said(frequency_penalty=0.5),
        said(presence_penalty=0.5),
    ],
    "`top_k`": [said(top_k=3)],
    "`min_p`, `min_tokens`, `ignore_eos`, `stop_token_ids`": [
        said(min_p=0.1),
        said(min_tokens=1),
        said(ignore_eos=True),
        said(stop_token_ids=[3]),
    ],
    "`stop_regex`": [said(stop_regex="[0-9]x")],
    "`return_logprob`, `logprob_start_len`": [said(return_logprob=True), said(logprob_start_len=0)],
    "`flush_cache`": [plait.flush_cache],
}


def table():
    """(feature, backend, cell) of every cell."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if line[:1] == "|"
    ]
    names = [name.replace("`", "") for name in rows[0][1:]]
    return [(row[0], name, cell) for row in rows[2:] for name, cell in zip(names, row[1:], strict=True)]


@pytest.fixture(scope="module")
def backends():
    """Each by its column's name. litellm is not installed for the tests; all that is wanted of it here is a failure."""
    server = servers.sglang(lambda text, body: "42")
    package = types.ModuleType("litellm")
    package.completion = _unreachable
    before = sys.modules.get("litellm")
    sys.modules["litellm"] = package
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = {
        "Runtime, Engine": ScriptedBackend(),
        "RuntimeEndpoint": plait.RuntimeEndpoint(server.url, chat_template=template),
        "OpenAI": plait.OpenAI("m", NOBODY),
        "Anthropic": plait.Anthropic("m", base_url=NOBODY, api_key="none", max_retries=0),
        "LiteLLM": plait.LiteLLM("m"),
    }
    yield found
    server.close()
    sys.modules.pop("litellm")
    if before is not None:
        sys.modules["litellm"] = before


class APIConnectionError(Exception):
    pass


def _unreachable(**request):
    raise APIConnectionError("nobody listens")


def is_taken(probe, backend):
    """Whether the service takes it; only a refusal of our own counts as none."""
    try:
        if probe is plait.flush_cache:
            probe(backend)
            return True

        @plait.function
        def program(s):
            if isinstance(probe, Expr):
                s += probe
            else:
                probe(s)

        program.run(backend=backend)
    except plait.InputError:
        return False
    except plait.ProgramError as error:
        cause = error.__cause__
        if isinstance(cause, plait.RuntimeGone):
            return True
        assert isinstance(cause, (plait.InputError, plait.CallFailed)), cause
        return _is_of_the_answer(str(cause))
    return True


def _is_of_the_answer(text):
    """The two doubles answer "42" or " fine." whatever was asked; that it fits nothing is no refusal."""
    return "is no whole" in text or "cannot be read" in text


def test_the_table_has_a_probe_for_every_row_and_a_row_for_every_probe(backends):
    assert {feature for feature, _, _ in table()} == set(PROBES)
    assert {name for _, name, _ in table()} == set(backends)


@pytest.mark.parametrize(("feature", "name", "cell"), table(), ids=lambda value: value[:24])
def test_the_cell_is_true(backends, feature, name, cell):
    for probe in PROBES[feature]:
        assert is_taken(probe, backends[name]) == (cell != "no"), (probe, cell)
