"""A ReAct agent: it thinks, calls a tool, reads the result, and answers in the end.

Yao et al. 2022, arXiv:2210.03629.
"""

from __future__ import annotations

import ast
import operator

import plait
from plait import Budget, assistant, gen, system, user

TOWNS = {"paris": 2_100_000, "rome": 2_800_000, "berlin": 3_700_000}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def population(town: str) -> int:
    """How many people live in a town.

    Args:
        town: the town's name, such as Paris
    """
    return TOWNS[town.lower()]


def calculate(expression: str) -> float:
    """Works out an arithmetic expression such as 3 * (4 + 5)."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(int() | float() as number):
                return number
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                return _OPERATORS[type(kind)](value(left), value(right))
        raise ValueError("only numbers and + - * / can be worked out")

    return value(ast.parse(expression, mode="eval").body)


@plait.function
def agent(s, question, max_steps=3):
    s += system("You answer questions in small steps, with tools.", tools=[population, calculate])
    s += user(question)
    for step in range(max_steps):
        s += assistant("Thought: " + gen(f"thought_{step}", stop=["\n", "."], max_tokens=24))
        s += user("Call the tool that you need.")
        s += assistant(gen(f"call_{step}", tools=[population, calculate], max_tokens=64))
        result = s.call(f"call_{step}")  # what the tool raises is told to the model too
        print(f"  {result.name}({result.call.arguments if result.call else ''}) -> {result.text}")
    s += user(f"So, from these results: {question} Answer in one sentence.")
    s += assistant("Together, " + gen("answer", max_tokens=40, stop="\n"))


def main() -> None:
    question = "How many people live in Paris and Rome together?"
    print(question)
    state = agent.run(question, temperature=0, budget=Budget(tokens=600))
    print(f"Together, {state['answer'].strip()}")
    print(f"{state.usage.sampled_tokens} tokens sampled, {state.usage.forced_tokens} forced by the tools' schemas")


if __name__ == "__main__":
    main()
