"""`beam`: beam search over forks. Each step computes one token per beam; what the beams share is cached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from plait.lang.argument_checks import checked_int
from plait.lang.core.expressions import Expr, Gen
from plait.lang.core.results import GenResult, TextSegment
from plait.lang.core.waiting import finish, value_of
from plait.lang.errors import program_error
from plait.lang.html.render import ShownList, fragment
from plait.lang.source_location import caller_location
from plait.lang.states.async_state import AsyncState
from plait.lang.states.state import ProgramState
from plait.runtime.errors import DeadlineExceeded, InputError
from plait.runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, sampling_params

if TYPE_CHECKING:
    from plait.runtime.tokenizer.tokenizer import Tokenizer

MAX_WIDTH = MAX_TOP_LOGPROBS // 2  # each step needs the 2 * width likeliest tokens of a beam
_USED = ("max_tokens", "stop", "stop_token_ids", "timeout_s")


@overload
def beam(s: ProgramState, width: int, expr: Expr, *, length_penalty: float = 1.0) -> list[BeamHypothesis]: ...
@overload
def beam(
    s: AsyncState, width: int, expr: Expr, *, length_penalty: float = 1.0
) -> Coroutine[Any, Any, list[BeamHypothesis]]: ...
def beam(
    s: ProgramState | AsyncState, width: int, expr: Expr, *, length_penalty: float = 1.0
) -> list[BeamHypothesis] | Coroutine[Any, Any, list[BeamHypothesis]]:
    """Continues with the best text of a beam search, and returns the `width` best ones, best first. Waits for them; in
    an async program it is awaited.

    `expr` is a gen: its name, max_tokens, stop, stop_token_ids and timeout (for all steps) count, and no others. Each
    step extends the `width` likeliest beams by one token. A beam ends with an end token, a stop token or a stop string,
    and is kept if it is among the `width` likeliest candidates of its step. All candidates of the last step end.

    The score of a text is the sum of the logprobs of its tokens / number of tokens ** `length_penalty`, the token that
    ends it included. 0: the likeliest text, which favours short ones; 1: the mean logprob. The search ends as soon as
    no beam can reach the score of the worst text that is kept. Nothing is drawn: equal calls give equal texts.

    This is the search of transformers' `generate(num_beams=width, early_stopping="never")`. It needs a Runtime or an
    Engine, and a width of at most 64. Raises InputError for wrong arguments, and ProgramError if a call fails.

    >>> texts = plait.beam(s, 4, gen("answer", max_tokens=24))          # doctest: +SKIP
    >>> s["answer"] == texts[0].text, texts[0].score                    # doctest: +SKIP
    (True, -0.31)
    """
    if not isinstance(s, ProgramState | AsyncState):
        raise InputError(f"beam takes a state, not {s!r:.80}")
    width = checked_int("beam: the width", width, 1, MAX_WIDTH)
    search = _BranchSearch(s, width, expr, _checked_penalty(length_penalty))
    if isinstance(s, AsyncState):
        return search.run(GenResult.wait_ready)
    return finish(search.run(GenResult.result))


class _BranchSearch:
    """One search on a branch. `_sessions`: the session of each beam, whose text ends with the beam's tokens."""

    def __init__(self, s: ProgramState | AsyncState, width: int, expr: Expr, length_penalty: float) -> None:
        self._branch, self._run = s._branch, s._branch.run
        self._name, params = _checked_gen(expr, self._run.defaults)
        session: Any = self._branch.session()
        if not self._run.client.takes_token_ids:
            raise InputError("beam needs a Runtime or an Engine; other services, and compile(), give no logprobs")
        self._ends_at = None if params.timeout_s is None else time.monotonic() + params.timeout_s
        self._place = caller_location()
        tokenizer = self._run.client.tokenizer
        self._search = BeamSearch(width, params, length_penalty, tokenizer)
        self._step_params = sampling_params(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            token_healing=False,  # a beam is extended by tokens, whose text begins behind the prompt
            logprobs=True,
            top_logprobs=2 * width,
        )
        self._sessions: list[Any] = [self._run.register_session(fork) for fork in session.fork(1)]

    async def run(self, wait: Callable[[GenResult], Any]) -> list[BeamHypothesis]:
        """Runs the search to its end. `wait` waits for one call of a step."""
        try:
            while not self._search.is_over:
                calls = self._start_step()
                for call in calls:
                    await value_of(wait(call))
                self._end_step(calls)
        finally:
            self._close(self._sessions)
        return self._adopt()

    def _start_step(self) -> list[GenResult]:
        """Starts a call per beam, on a fork of it, that gives the logprobs of the next token."""
        calls = []
        for session in self._sessions:
            (probe,) = session.fork(1)
            self._run.register_session(probe)
            call = GenResult(self._run, self._name, probe.generate(self._limited(self._step_params)))
            call.branch_id = self._branch.branch_id
            self._run.add(call)
            self._run.close(probe)
            calls.append(call)
        return calls

    def _end_step(self, calls: list[GenResult]) -> None:
        logprobs = [call.result().logprobs for call in calls]
        chosen = self._search.extend([entries[0].top if entries else [] for entries in logprobs])
        sessions = [self._child(candidate) for candidate in chosen]
        self._close(self._sessions)
        self._sessions = sessions

    def _child(self, candidate: Candidate) -> Any:
        (child,) = self._sessions[candidate.beam].fork(1)
        self._run.register_session(child)
        child.append_tokens([candidate.token])
        return child

    def _limited(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters of a call that starts now."""
        try:
            return self._run.limited_params(params, self._ends_at, "the timeout passed before the search ended")
        except DeadlineExceeded as error:
            raise program_error(self._run.program, self._name, error, self._place) from error

    def _close(self, sessions: list[Any]) -> None:
        for session in sessions:
            self._run.close(session)

    def _adopt(self) -> list[BeamHypothesis]:
        """Appends the best text to the branch: its own tokens, unless a stop string cut them."""
        hypotheses = self._search.hypotheses()
        best, tokens = hypotheses[0], self._search.tokens_of_best()
        if tokens is None:
            self._branch.session().append(best.text)
        else:
            session: Any = self._branch.session()
            session.append_tokens(tokens)
        self._branch.add(self._name, TextSegment(best.text))
        return hypotheses


def _checked_penalty(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -10 <= value <= 10:
        raise InputError(f"beam: length_penalty must be a number from -10 to 10, not {value!r:.40}")
    return float(value)


def _checked_gen(expr: object, defaults: Any) -> tuple[str | None, SamplingParams]:
    """Returns the name and the parameters of the gen. Raises InputError for what a search cannot do."""
    if type(expr) is not Gen or expr.constraint is not None:
        raise InputError("beam takes one gen without a constraint, type or tools: beam(s, 4, gen('x', max_tokens=32))")
    for field in expr.options.fields:
        if field not in _USED:
            raise InputError(f"beam: {field} of the gen has no effect in a beam search; leave it out")
    if expr.options.n not in (None, 1):
        raise InputError("beam: n of the gen has no effect in a beam search; it returns the `width` best texts")
    params, _ = expr.options.merged_over(defaults)
    if params.max_tokens < 1:
        raise InputError("beam: max_tokens must be at least 1")
    return expr.name, params


# -- beam search ----------------------------------------------------------------------------------
# `BeamSearch`: which beams a search extends and which texts it keeps. Knows no sessions and no calls.


@dataclass(frozen=True)
class BeamHypothesis:
    """A text that a beam search found. `logprob`: the sum over its tokens. `score`: logprob / num_tokens **
    length_penalty. `num_tokens` counts the token that ended it. `finish_reason` "length" is max_tokens."""

    text: str
    logprob: float
    score: float
    num_tokens: int
    finish_reason: Literal["stop", "length"]


def _table(beams: Sequence[BeamHypothesis]) -> str:
    return fragment("beams", beams)


class Candidate(NamedTuple):
    """Beam number `beam`, extended by a token. `logprob`: the sum over all its tokens."""

    beam: int
    token: int
    logprob: float


class _Kept(NamedTuple):
    hypothesis: BeamHypothesis
    tokens: tuple[int, ...] | None  # None: a stop string cut the text


class BeamSearch:
    """The state of one search: `width` beams of tokens with their logprobs, and the best finished texts."""

    def __init__(self, width: int, params: SamplingParams, length_penalty: float, tokenizer: Tokenizer) -> None:
        self._width, self._max_tokens, self._penalty = width, params.max_tokens, length_penalty
        self._stop, self._tokenizer = params.stop, tokenizer
        self._end_tokens = {*tokenizer.eos_ids, *params.stop_token_ids}
        self._beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self._kept: list[_Kept] = []

    @property
    def is_over(self) -> bool:
        """Whether no beam is left, or none can reach the score of the worst text that is kept."""
        if not self._beams:
            return True
        if len(self._kept) < self._width:
            return False
        length = self._max_tokens if self._penalty > 0 else max(1, len(self._beams[0][0]))
        best_possible = max(self._score(logprob, length) for _, logprob in self._beams)
        return best_possible <= self._kept[-1].hypothesis.score

    def extend(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[Candidate]:
        """Takes the likeliest tokens after each beam, as (token, logprob). Returns the next beams."""
        candidates = [
            Candidate(beam, token, self._beams[beam][1] + logprob)
            for beam, tokens in enumerate(likeliest)
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)  # stable: ties keep the order of beams and tokens
        is_last = len(self._beams[0][0]) + 1 == self._max_tokens
        going_on: list[Candidate] = []
        for rank, candidate in enumerate(candidates[: 2 * self._width]):
            tokens = (*self._beams[candidate.beam][0], candidate.token)
            text, reason, is_cut = self._text_of(tokens)
            if reason == "length" and not is_last:
                going_on.append(candidate)
            elif rank < self._width:
                self._keep(tokens, candidate.logprob, text, reason, is_cut)
        chosen = going_on[: self._width]
        self._beams = [((*self._beams[beam][0], token), logprob) for beam, token, logprob in chosen]
        return chosen

    def hypotheses(self) -> list[BeamHypothesis]:
        """Returns the texts that are kept, best first."""
        return ShownList(_table, (kept.hypothesis for kept in self._kept))

    def tokens_of_best(self) -> list[int] | None:
        """Returns the tokens of the best text, without the one that ended it; None if a stop string cut it."""
        tokens = self._kept[0].tokens
        return None if tokens is None else list(tokens)

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self._penalty)

    def _text_of(self, tokens: tuple[int, ...]) -> tuple[str, Literal["stop", "length"], bool]:
        """Returns the text of a beam, "stop" if its last token ends it, and whether a stop string cut it."""
        if tokens[-1] in self._end_tokens:
            return self._tokenizer.decode(tokens[:-1]), "stop", False
        text = self._tokenizer.decode(tokens)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return (text[: min(ends)], "stop", True) if ends else (text, "length", False)

    def _keep(
        self, tokens: tuple[int, ...], logprob: float, text: str, reason: Literal["stop", "length"], is_cut: bool
    ) -> None:
        score = self._score(logprob, len(tokens))
        hypothesis = BeamHypothesis(text, logprob, score, len(tokens), reason)
        own = None if is_cut else tokens[:-1] if reason == "stop" else tokens
        self._kept.append(_Kept(hypothesis, own))
        self._kept.sort(key=lambda kept: -kept.hypothesis.score)  # stable
        del self._kept[self._width :]
