"""Gens of several calls: one whose value is checked and asked for again, and one with a free draft before its value.

The calls run on a fork. The program's text goes on with the last answer alone, so a refused one and a draft are never
part of it. Drafts are draft-conditioned constrained decoding (arXiv 2603.03305).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.budget import BudgetExceeded
from plait.lang.core.results import GenResult, TextSegment
from plait.lang.core.retries.retried_call import NOT_READ, RetriedCall
from plait.lang.errors import Attempt, program_error
from plait.lang.source_location import caller_location
from plait.lang.typed.value_format import RefusedValue
from plait.runtime.errors import InputError
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.core.expressions import Gen
    from plait.runtime.client.call import Call, CallResult
    from plait.runtime.sampling_params import SamplingParams


# -- the question before another answer -----------------------------------------------------------

MAX_REASON_CHARS = 2000  # a validator's message may repeat the text that it refuses

Ask = Callable[[Any, int, str], None]


def question_after(branch: Branch, question: Callable[[str], str] | None = None) -> Ask:
    """Returns a function `ask(session, number, reason)` that appends `question(reason)` after answer `number`, counted
    from 1, to a session that has the branch's text and that answer. By default it asks for a valid answer."""
    write, lead = question or _correction, _text_before_call(branch)
    if branch.open_turn is None or branch.open_turn[0] != "assistant":
        return _ask_in_a_line(write, lead)
    template, roles = branch.template(), branch.roles()

    def ask(session: Any, number: int, reason: str) -> None:
        before = (*roles, *("assistant", "user") * (number - 1))
        asked = (*before, "assistant")
        session.append(template.turn_suffix(before, "assistant"), control=True)
        session.append(template.turn_prefix(asked, "user"), control=True)
        session.append(write(reason))
        session.append(template.turn_suffix(asked, "user"), control=True)
        session.append(template.turn_prefix((*asked, "user"), "assistant"), control=True)
        if lead:
            session.append(lead)

    return ask


def _ask_in_a_line(write: Callable[[str], str], lead: str) -> Ask:
    last_line = lead.rpartition("\n")[2]

    def ask(session: Any, number: int, reason: str) -> None:
        session.append(f"\n{write(reason)}\n{last_line}")

    return ask


def _correction(reason: str) -> str:
    return f"This answer is not valid: {reason[:MAX_REASON_CHARS]}\nCorrect it, and give the complete answer again."


def _text_before_call(branch: Branch) -> str:
    """Returns the literal text of the open turn (or of the text without turns) since its last call."""
    start = 0 if branch.open_turn is None else branch.open_turn[1]
    lead: list[str] = []
    for segment in reversed(branch.segments[start:]):
        if not isinstance(segment, TextSegment) or segment.control:
            break
        lead.insert(0, segment.text())
    return "".join(lead)


# -- gens in steps, and those with retries --------------------------------------------------------


def begin_gen_in_steps(branch: Branch, gen: Gen, params: SamplingParams, n: int, is_cut_by_budget: bool) -> None:
    """Starts a gen of several calls: with a draft before its value, or with retries after it. Raises what a plain gen
    raises."""
    if n > 1:
        option = "retries" if gen.retries else "draft_then_constrain"
        raise InputError(f"{option} cannot be combined with n; use forks, one for each sample")
    begin = _begin_drafted_gen if gen.draft_tokens else _begin_retried_gen
    begin(branch, gen, params, is_cut_by_budget)


class RetriedGen(GenResult):
    """The result of a gen with `retries`. Its value was read when its call ended."""

    call: RetriedCall

    def value(self) -> Any:
        self.result()
        return super().value() if self.call.value is NOT_READ else self.call.value

    def _attempts(self, text: str, refusal: RefusedValue) -> tuple[Attempt, ...]:
        return tuple(self.call.refused) or super()._attempts(text, refusal)


def _begin_retried_gen(branch: Branch, gen: Gen, params: SamplingParams, is_cut_by_budget: bool) -> None:
    """Starts the first attempt, and appends the text of the last one, which is known later, to the branch."""
    value_format = gen.value_format
    assert value_format is not None  # `gen` needs a type for retries

    def read(call: RetriedCall, result: CallResult) -> Any:
        return value_format.read_result(result.text, result.finish_reason)

    ask = question_after(branch)
    _begin(branch, gen, (params,) * (gen.retries + 1), is_cut_by_budget, (RetriedCall, RetriedGen), ask, read)


def _begin(
    branch: Branch,
    gen: Gen,
    steps: Sequence[SamplingParams],
    is_cut_by_budget: bool,
    types: tuple[type[RetriedCall], type[GenResult]],
    ask: Ask,
    read: Callable[[RetriedCall, CallResult], Any],
    num_drafts: int = 0,
) -> None:
    """Starts a gen of several calls on a fork, and appends its text, which is known later, to the branch.

    `steps`: the parameters of each call; the first `num_drafts` have no constraint. `types`: of the calls taken as one
    and of its result. `read(call, result)` returns the value of a step, or raises RefusedValue.
    """
    run, place = branch.run, caller_location()
    (session,) = branch.session().fork(1)
    timeout_s = steps[-1].timeout_s
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    def start(refused: Sequence[Attempt]) -> Call:
        number = len(refused)
        if refused:
            ask(session, number, refused[-1].reason)
        session.set_next_call_name(gen.name)
        limited = run.limited_params(steps[number], ends_at, "the timeout passed before the gen could be asked again")
        limited, is_draft = limited.for_sample(number), number < num_drafts
        result.is_cut_by_budget |= not is_draft and limited.max_tokens < steps[number].max_tokens
        return session.generate(limited, None if is_draft else gen.constraint)

    def on_budget_spent(error: BudgetExceeded) -> None:
        run.fail(program_error(run.program, gen.name, error, place))

    make_call, make_result = types
    call: RetriedCall = make_call(
        run.client, timeout_s, len(steps), start, lambda answer: read(call, answer), session, on_budget_spent
    )
    result = make_result(run, gen.name, call, gen.value_format)
    result.branch_id, result.is_cut_by_budget = branch.branch_id, is_cut_by_budget
    run.add(result)  # before the first step, whose tokens count
    call.begin()
    branch.defer_session().append_later((call,), lambda: ((call.result().text, False),))
    branch.add(gen.name, result)


# -- gens with a draft ----------------------------------------------------------------------------

DRAFT_TOKENS = 256
_INSTRUCTION = "Give this answer again in the required form, and nothing else."


class DraftedCall(RetriedCall):
    """The draft and the value as one call. Its result is that of the value; the meta info has the draft."""

    def text_so_far(self) -> str:
        """Returns the text of the value that has arrived."""
        with self._lock:
            is_draft = not self.done() and self._num_attempts < 2
        return "" if is_draft else super().text_so_far()

    def _extra_meta(self) -> dict[str, Any]:
        return {"draft": self._metas[0]["text"]}


def checked_draft_tokens(where: str, draft: object, draft_tokens: object) -> int:
    """Returns the most tokens of the draft. Raises InputError for what is not a number of tokens."""
    if draft is not None and not isinstance(draft, bool):
        raise InputError(f"{where}: draft_then_constrain must be True or False, not {draft!r:.40}")
    if not draft:
        raise InputError(f"{where}: draft_tokens needs draft_then_constrain=True")
    if draft_tokens is None:
        return DRAFT_TOKENS
    if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int) or not 1 <= draft_tokens <= MAX_TOKENS_LIMIT:
        text = f"draft_tokens must be a number of tokens from 1 to {MAX_TOKENS_LIMIT}, not {draft_tokens!r:.40}"
        raise InputError(f"{where}: {text}")
    return draft_tokens


def _begin_drafted_gen(branch: Branch, gen: Gen, params: SamplingParams, is_cut_by_budget: bool) -> None:
    """Starts the draft, and appends the text of the value, which is known later, to the branch."""

    def read(call: RetriedCall, result: CallResult) -> None:
        if not call.refused:
            raise RefusedValue("it is the draft")

    steps = (_draft_params(params, gen), params)
    ask = question_after(branch, lambda _: _INSTRUCTION)
    _begin(branch, gen, steps, is_cut_by_budget, (DraftedCall, GenResult), ask, read, num_drafts=1)


def _draft_params(params: SamplingParams, gen: Gen) -> SamplingParams:
    """Returns the parameters of the draft: those of the gen without what belongs to the value."""
    free = {"min_tokens": 0, "complete": False, "if_it_fits": False, "exact": False, "particles": None}
    free |= {"logprobs": False, "top_logprobs": 0, "prompt_logprobs_from": None}
    return msgspec.structs.replace(params, max_tokens=gen.draft_tokens, **free)
