"""`plait.beam`: against an exhaustive search, a slow search without forks, and transformers' beam search."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import torch
from chain_engine import FIRST, chain_engine
from fake_engine import VOCAB, logits_after, state_of
from scripted_scheduler import byte_tokenizer
from tiny_llama_checkpoints import save_tiny_llama

import plait
from plait import gen
from plait.lang.control.beam import BeamSearch
from plait.runtime.sampling_params import sampling_params
from plait.testing import Scripted

PROMPT = "Once upon"


@pytest.fixture(scope="module")
def engine():
    with chain_engine(byte_tokenizer()) as engine:
        yield engine


def chain_logprobs(tokens: list[int]) -> torch.Tensor:
    """[259] the logprobs of the next token in the engine's model, computed from all tokens."""
    logits = torch.full((259,), -50.0)
    logits[FIRST : FIRST + VOCAB] = logits_after(state_of(tokens))
    return torch.log_softmax(logits, -1)


@plait.function
def search(s, width, **options):
    s += PROMPT
    penalty = options.pop("length_penalty", 1.0)
    s["found"] = plait.beam(s, width, gen("x", **options), length_penalty=penalty)
    s += "|" + gen("after", max_tokens=2, temperature=0)


def test_wide_search_finds_the_likeliest_text(engine):
    """With a beam for every likely token, a search of two steps sees all texts."""
    found = search.run(64, max_tokens=2, backend=engine)["found"]
    prompt, scores = list(PROMPT.encode()), {}
    for first, second in itertools.product(range(FIRST, FIRST + VOCAB), repeat=2):
        logprob = chain_logprobs(prompt)[first] + chain_logprobs([*prompt, first])[second]
        scores[bytes([first, second])] = float(logprob) / 2
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    assert [hypothesis.text.encode() for hypothesis in found[:20]] == best[:20]
    assert [hypothesis.score for hypothesis in found[:20]] == pytest.approx(
        [scores[text] for text in best[:20]], abs=1e-4
    )
    assert len(found) == 64 and {hypothesis.finish_reason for hypothesis in found} == {"length"}


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_search_equals_one_that_computes_every_text_anew(engine, width):
    state = search.run(width, max_tokens=5, backend=engine)
    beams = [([], 0.0)]
    for _ in range(5):
        candidates = []
        for tokens, logprob in beams:
            row = chain_logprobs([*PROMPT.encode(), *tokens])
            candidates += [([*tokens, token], logprob + float(row[token])) for token in range(259)]
        beams = sorted(candidates, key=lambda beam: -beam[1])[:width]
    found = state["found"]
    assert [hypothesis.text.encode() for hypothesis in found] == [bytes(tokens) for tokens, _ in beams]
    assert [hypothesis.logprob for hypothesis in found] == pytest.approx([logprob for _, logprob in beams], abs=1e-4)
    assert state["x"] == found[0].text and state.text().startswith(f"{PROMPT}{found[0].text}|")


def test_text_goes_on_after_the_best_one(engine):
    state = search.run(3, max_tokens=4, backend=engine)

    @plait.function
    def same_text(s):
        s += f"{PROMPT}{state['x']}|" + gen("after", max_tokens=2, temperature=0)

    assert same_text.run(backend=engine)["after"] == state["after"]
    assert search.run(3, max_tokens=4, backend=engine)["found"] == state["found"], "nothing is drawn"


def test_beams_share_their_prefix(engine):
    engine.client.flush_cache()
    computed = engine.runner.num_computed
    search.run(4, max_tokens=6, backend=engine)
    new = engine.runner.num_computed - computed
    assert new <= len(PROMPT) + 4 * 6 + 4 + 6, "one token per beam and step, and the text after it"


def test_async_program(engine):
    @plait.function
    async def program(s):
        s += PROMPT
        return await plait.beam(s, 3, gen("x", max_tokens=4))

    async def run():
        return (await program.arun(backend=engine)).ret_value

    assert asyncio.run(run()) == search.run(3, max_tokens=4, backend=engine)["found"]


def test_beam_on_a_fork_and_after_a_join(engine):
    @plait.function
    def program(s):
        s += "Once"
        forks = s.fork(2)
        forks += " upon"
        found = plait.beam(forks[0], 2, gen("x", max_tokens=3))
        forks.join("concate_and_append")
        s += gen("y", max_tokens=2)
        found_after = plait.beam(s, 2, gen("z", max_tokens=2))
        return found, found_after

    state = program.run(backend=engine)
    found, found_after = state.ret_value
    assert found == search.run(2, max_tokens=3, backend=engine)["found"]
    assert state.text().startswith(f"Once upon{found[0].text} upon") and state.text().endswith(found_after[0].text)


def test_stop_string_ends_a_beam_and_is_cut(engine):
    plain = search.run(2, max_tokens=4, backend=engine)["found"][0]
    stop = plain.text[1:3]
    state = search.run(2, max_tokens=4, stop=stop, length_penalty=0.0, backend=engine)
    stopped = [hypothesis for hypothesis in state["found"] if hypothesis.finish_reason == "stop"]
    assert stopped and all(stop not in hypothesis.text for hypothesis in state["found"])
    assert any(hypothesis.text == plain.text[:1] and hypothesis.num_tokens == 3 for hypothesis in stopped)
    assert state.text().startswith(f"{PROMPT}{state['x']}|")


def test_budget_and_timeout_end_the_search(engine):
    with pytest.raises(plait.ProgramError) as caught:
        search.run(4, max_tokens=20, backend=engine, budget=plait.Budget(tokens=10))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded)
    with pytest.raises(plait.ProgramError) as caught:
        search.run(4, max_tokens=100, timeout=1e-9, backend=engine)
    assert isinstance(caught.value.__cause__, plait.DeadlineExceeded)


@pytest.mark.parametrize(
    ("width", "expr", "message"),
    [
        (0, gen("x"), "width must be an integer from 1 to 64"),
        (65, gen("x"), "width must be"),
        (2, gen("x", type=int), "without a constraint"),
        (2, gen("x", regex="a"), "without a constraint"),
        (2, "a" + gen("x"), "takes one gen"),
        (2, gen("x", temperature=1), "temperature of the gen has no effect"),
        (2, gen("x", n=2), "n of the gen has no effect"),
    ],
)
def test_wrong_arguments(engine, width, expr, message):
    @plait.function
    def program(s):
        s += "p"
        plait.beam(s, width, expr)

    with pytest.raises(plait.ProgramError, match=message):
        program.run(backend=engine)


def test_backends_without_logprobs_and_compile_are_refused():
    with Scripted({}), pytest.raises(plait.ProgramError, match="beam needs a Runtime or an Engine"):
        search.run(2, max_tokens=2)
    with pytest.raises(plait.CompileError, match="beam needs a Runtime or an Engine"):
        search.compile(2)


# -- transformers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def plait_search(model, prompt, width, max_tokens, length_penalty, eos):
    """The search of plait over the logits of a transformers model; the tokens are bytes."""
    tokenizer = SimpleNamespace(eos_ids=eos, decode=lambda ids: ",".join(map(str, ids)))
    state = BeamSearch(width, sampling_params(max_tokens=max_tokens), length_penalty, tokenizer)
    beams = [[]]
    while not state.is_over:
        ids = torch.tensor([[*prompt, *tokens] for tokens in beams])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[:, -1].float(), -1)
        top = [[(int(token), float(row[token])) for token in row.topk(2 * width).indices] for row in rows]
        beams = [[*beams[candidate.beam], candidate.token] for candidate in state.extend(top)]
    return state.hypotheses()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [(), (5, 9, 11, 17)])
def test_search_equals_transformers(llama, width, length_penalty, eos):
    for prompt in ([1, 2, 3], [7, 30, 4, 12]):
        with torch.no_grad():
            output = llama.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=6,
                do_sample=False,
                length_penalty=length_penalty,
                early_stopping="never",
                eos_token_id=list(eos) or None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        found = plait_search(llama, prompt, width, 6, length_penalty, eos)
        for row, score, hypothesis in zip(output.sequences, output.sequences_scores, found, strict=True):
            new = row[len(prompt) :].tolist()
            end = next((at for at, token in enumerate(new) if token in eos), len(new))
            assert hypothesis.text == ",".join(map(str, new[:end]))
            assert hypothesis.score == pytest.approx(float(score), abs=1e-4)
