"""Executes an expression on a strand: each node becomes instructions to the session, and nothing here waits.

Knows: every node, and the session's methods. Must not know: threads, streaming, how values are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from plait.lang.answers import Chosen, Generated, Several
from plait.lang.errors import program_error
from plait.lang.expressions import Concat, Expr, Gen, RoleBegin, RoleEnd, Select, Text
from plait.lang.strand import Strand
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.runtime.sampling import SamplingParams


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
        case Gen() | Select():
            _begin_call(strand, expr)
        case RoleBegin():
            strand.begin_turn(expr.role)
        case RoleEnd():
            strand.end_turn(expr.role)
        case _:
            raise InputError(f"{type(expr).__name__} is no expression that plait can run")


def _begin_call(strand: Strand, expr: Gen | Select) -> None:
    try:
        if isinstance(expr, Gen):
            _generate(strand, expr)
        else:
            _select(strand, expr)
    except PlaitError as error:
        raise program_error(strand.run.program, expr.name, error) from error


def _generate(strand: Strand, expr: Gen) -> None:
    run, session = strand.run, strand.session()
    params, n = expr.options.over(run.defaults)
    others = session.fork(n - 1) if n > 1 else []
    answers: list[Generated] = []
    for index, each in enumerate((session, *others)):
        call = each.generate(_sample(params, index), expr.constraint)
        answers.append(Generated(run, expr.name, call, expr.form))
        run.add(answers[-1])
    for each in others:
        each.close()
    for answer in answers:
        answer.siblings = tuple(answers)
    strand.add(expr.name, answers[0] if n == 1 else Several(answers))


def _sample(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index` of n: with one seed for all, all would be the same."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=params.seed + index)


def _select(strand: Strand, expr: Select) -> None:
    run = strand.run
    timeout_s = expr.timeout_s if expr.timeout_s is not None else run.defaults.fields.get("timeout_s")
    call = strand.session().select(expr.choices, expr.method, timeout_s)
    answer = Chosen(run, expr.name, call, expr.choices)
    run.add(answer)
    strand.add(expr.name, answer)
