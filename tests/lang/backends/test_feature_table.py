"""Every cell of the table in docs/backends.md: a service accepts what the table says, and refuses the rest unsent.

The chat APIs are at an address where nobody listens: an accepted call fails to connect, a refused one does not try.
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

UNREACHABLE = "http://127.0.0.1:9"
PAGE = Path(__file__).parents[3] / "docs" / "backends.md"


def look_up(word: str) -> str:
    """Looks a word up."""
    return word


def turns_with_gen(**options):
    return user("Q") + assistant(gen("x", **options))


def fork_with_samples(s):
    forks = s.fork(2)
    forks += turns_with_gen(n=2)
    forks.join()


PROBES = {
    "turns": [turns_with_gen()],
    "system turns after other turns": [user("Q") + system("S") + assistant(gen("x"))],
    "plain text": ["Q" + gen("x")],
    "text before a gen in its turn": [user("Q") + assistant("It is " + gen("x"))],
    "forks, `n`": [fork_with_samples],
    "`regex`, `json_schema`, `type`, sampled `choices`": [
        turns_with_gen(regex="[a-z]+"),
        turns_with_gen(json_schema={"type": "object"}),
        turns_with_gen(type=int),
        turns_with_gen(choices=["42", "b"], temperature=1.0),
    ],
    "`ebnf`": [turns_with_gen(ebnf='root ::= "42"')],
    "`lark`": [turns_with_gen(lark='start: "42"')],
    "`tools`": [turns_with_gen(tools=[look_up])],
    '`tools` with `tool_choice="auto"`': [turns_with_gen(tools=[look_up], tool_choice="auto")],
    "`select`": [user("Q") + assistant(select("x", ["a", "b"]))],
    "the other `choices_method`s": [
        user("Q") + assistant(select("x", ["a", "b"], choices_method=method))
        for method in (plait.greedy_token_selection, plait.unconditional_likelihood_normalized)
    ],
    "`stop`, `temperature`, `top_p`": [
        turns_with_gen(stop="."),
        turns_with_gen(temperature=0.5),
        turns_with_gen(top_p=0.5),
    ],
    "`seed`, `frequency_penalty`, `presence_penalty`": [
        turns_with_gen(seed=1),
        turns_with_gen(frequency_penalty=0.5),
        turns_with_gen(presence_penalty=0.5),
    ],
    "`logit_bias`": [turns_with_gen(logit_bias={5: 1.0})],
    "`top_k`": [turns_with_gen(top_k=3)],
    "`min_p`, `typical_p`, `min_tokens`, `ignore_eos`, `stop_token_ids`": [
        turns_with_gen(min_p=0.1),
        turns_with_gen(typical_p=0.7),
        turns_with_gen(min_tokens=1),
        turns_with_gen(ignore_eos=True),
        turns_with_gen(stop_token_ids=[3]),
    ],
    "`repetition_penalty`": [turns_with_gen(repetition_penalty=1.1)],
    "`token_healing`": [turns_with_gen(token_healing=True)],
    "`exact`, `particles`": [
        turns_with_gen(exact=True, regex="a+"),
        turns_with_gen(particles=2, regex="a|b"),
    ],
    "`stop_regex`": [turns_with_gen(stop_regex="[0-9]x")],
    "`return_logprob`, `logprob_start_len`": [turns_with_gen(return_logprob=True), turns_with_gen(logprob_start_len=0)],
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
    """Backends by the name of their column. litellm is not installed: a module in its place fails every call."""
    server = servers.sglang(lambda text, body: "42")
    package = types.ModuleType("litellm")
    package.completion = _raise_connection_error
    installed = sys.modules.get("litellm")
    sys.modules["litellm"] = package
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    by_name = {
        "Runtime, Engine": ScriptedBackend(),
        "RuntimeEndpoint": plait.RuntimeEndpoint(server.url, chat_template=template),
        "OpenAI": plait.OpenAI("m", UNREACHABLE),
        "Anthropic": plait.Anthropic("m", base_url=UNREACHABLE, api_key="none", max_retries=0),
        "LiteLLM": plait.LiteLLM("m"),
    }
    yield by_name
    server.close()
    sys.modules.pop("litellm")
    if installed is not None:
        sys.modules["litellm"] = installed


class APIConnectionError(Exception):
    pass


def _raise_connection_error(**request):
    raise APIConnectionError("nobody listens")


def is_accepted(probe, backend):
    """Whether the backend sends the call; only an InputError before sending counts as a refusal."""
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
        return _is_about_the_answer(str(cause))
    return True


def _is_about_the_answer(text):
    """Whether the answer is at fault: the two doubles answer "42" or " fine." to any request."""
    return "cannot be read" in text


def test_table_rows_and_probes_are_the_same_features(backends):
    assert {feature for feature, _, _ in table()} == set(PROBES)
    assert {name for _, name, _ in table()} == set(backends)


@pytest.mark.parametrize(("feature", "name", "cell"), table(), ids=lambda value: value[:24])
def test_cell_says_whether_the_backend_accepts_the_feature(backends, feature, name, cell):
    for probe in PROBES[feature]:
        assert is_accepted(probe, backends[name]) == (cell != "no"), (probe, cell)
