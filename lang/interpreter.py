"""Executes an expression on a strand: each node becomes instructions to the session, and nothing here waits.

Knows: every node, and the session's methods. Must not know: threads, streaming, how values are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from plait.lang.answers import Chosen, Generated, Several
from plait.lang.compat.reasoning import SUFFIX, Half, Reasoned
from plait.lang.errors import program_error
from plait.lang.expressions import (
    Concat,
    Expr,
    Gen,
    GenCall,
    RoleBegin,
    RoleEnd,
    Select,
    SystemWithTools,
    Text,
)
from plait.lang.place import here
from plait.lang.strand import Strand
from plait.lang.tools.generating import call_form, ended_by_call
from plait.lang.tools.wording import PLAIN, own_system_turn, plain_listing, wording_of
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.runtime.client.session import Session
    from plait.runtime.sampling_params import SamplingParams


def execute(expr: Expr, strand: Strand) -> None:
    """Appends `expr` to `strand`.

    Raises ProgramError, naming the variable, where a call could not even begin.
    """
    match expr:
        case Text():
            strand.write(expr.text)
        case Concat():
            for part in expr.parts:
                execute(part, strand)
        case Gen() | Select() | GenCall():
            _begin_call(strand, expr)
        case Reasoned(gen, marks):
            execute(gen, strand)
            whole = strand.variables[str(gen.name)]
            strand.set(str(gen.name), Half(whole, marks, 1))
            strand.set(f"{gen.name}{SUFFIX}", Half(whole, marks, 0))
        case SystemWithTools():
            _system_with_tools(strand, expr)
        case RoleBegin():
            strand.begin_turn(expr.role)
        case RoleEnd():
            strand.end_turn(expr.role)
        case _:
            raise InputError(f"{type(expr).__name__} is no expression that plait can run")


def _begin_call(strand: Strand, expr: Gen | Select | GenCall) -> None:
    try:
        match expr:
            case Gen():
                _generate(strand, expr)
            case Select():
                _select(strand, expr)
            case GenCall():
                _generate_call(strand, expr)
    except PlaitError as error:
        raise program_error(strand.run.program, expr.name, error, here()) from error


def _announce(session: Session, name: str | None) -> None:
    """Tells a session that wants to know which variable its next call is for; a scheduler need not."""
    told = getattr(session, "announce", None)
    if told is not None:
        told(name)


def _generate(strand: Strand, expr: Gen) -> None:
    run, session = strand.run, strand.session()
    params, n = expr.options.over(run.defaults)
    if run.ledger is not None:
        params = run.ledger.limited(params)
    others = session.fork(n - 1) if n > 1 else []
    answers: list[Generated] = []
    for index, each in enumerate((session, *others)):
        _announce(each, expr.name)
        call = each.generate(_sample(params, index), expr.constraint)
        answers.append(Generated(run, expr.name, call, expr.form))
        answers[-1].lane = strand.lane if index == 0 else run.new_lane(strand.lane)
        run.add(answers[-1])
    for each in others:
        each.close()
    for answer in answers:
        answer.siblings = tuple(answers)
    strand.add(expr.name, answers[0] if n == 1 else Several(answers))


def _generate_call(strand: Strand, expr: GenCall) -> None:
    """The model's words around a call are not sampled, where a call must be made."""
    wording = wording_of(strand.run.client.tokenizer.chat_template) if strand.in_turn else PLAIN
    form = call_form(expr.tools, expr.choice, wording)
    options = ended_by_call(expr.options) if expr.choice == "auto" else expr.options
    must = expr.choice == "required"
    if must and form.wording.begin:
        strand.write(form.wording.begin, control=form.wording.is_own)
    _generate(strand, Gen(expr.name, options, form.spec, form))
    if must and form.wording.end:
        strand.write(form.wording.end, control=form.wording.is_own)


def _system_with_tools(strand: Strand, expr: SystemWithTools) -> None:
    tokenizer = strand.run.client.tokenizer
    template, listing = tokenizer.chat_template, [tool.as_json() for tool in expr.tools]
    own = None if template is None or strand.turns or strand.segments else own_system_turn(template, expr.tools)
    spelled = tokenizer.encode([(msgspec.json.encode(listing).decode(), True)], at_start=False)
    if own is not None and not tokenizer.control_ids.intersection(spelled):  # a description must not end the turn
        strand.own_turn("system", *own, lambda: execute(expr.content, strand))
        return
    strand.begin_turn("system")
    execute(expr.content, strand)
    strand.write("\n\n" + plain_listing(expr.tools, wording_of(template)))
    strand.end_turn("system")


def _sample(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index` of n: with one seed for all, all would be the same."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=params.seed + index)


def _select(strand: Strand, expr: Select) -> None:
    run = strand.run
    timeout_s = expr.timeout_s if expr.timeout_s is not None else run.defaults.fields.get("timeout_s")
    if run.ledger is not None:
        timeout_s = run.ledger.timeout(timeout_s)
    session = strand.session()
    _announce(session, expr.name)
    call = session.select(expr.choices, expr.method, timeout_s)
    answer = Chosen(run, expr.name, call)
    answer.lane = strand.lane
    run.add(answer)
    strand.add(expr.name, answer)
