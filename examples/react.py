"""A ReAct agent: it thinks, calls a tool, reads the result, and answers in the end. Yao et al. 2022, arXiv:2210.03629.

As in the paper, the prompt begins with examples of such steps.
"""

from __future__ import annotations

import ast
import operator

import plait
from plait import Budget, gen

THOUSANDS = {"paris": 2100, "rome": 2800, "berlin": 3700}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def population(town: str) -> int:
    """How many thousand people live in a town.

    Args:
        town: the town's name, such as Paris
    """
    return THOUSANDS[town.lower()]


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


TOOLS = [population, calculate]
EXAMPLES = """\
Question: How many thousand people live in Oslo and Bern together?
Thought: I need to know how many people live in Oslo.
Action: <tool_call>
{"name": "population", "arguments": {"town": "Oslo"}}
</tool_call>
Result of population: 700
Thought: I need to know how many people live in Bern.
Action: <tool_call>
{"name": "population", "arguments": {"town": "Bern"}}
</tool_call>
Result of population: 140
Thought: I add 700 and 140.
Action: <tool_call>
{"name": "calculate", "arguments": {"expression": "700 + 140"}}
</tool_call>
Result of calculate: 840
Answer: 840 thousand people live in Oslo and Bern together.

"""


@plait.function
def agent(s, question, max_steps=4):
    s += EXAMPLES + EXAMPLES.replace("Oslo", "Ghent").replace("Bern", "Lyon") + f"Question: {question}\n"
    for step in range(max_steps):
        s += "Thought:" + gen(f"thought_{step}", stop="\n", max_tokens=24)
        s += "\nAction: " + gen(f"call_{step}", tools=TOOLS, max_tokens=64)
        result = s.call(f"call_{step}")  # the model also reads the error of a tool that raised
        print(f" {s[f'thought_{step}']}")
        print(f"    {result.name}({result.call.arguments if result.call else ''}) -> {result.text}")
        if result.name == "calculate":
            break
    s += "Answer:" + gen("answer", max_tokens=40, stop="\n")


def main() -> None:
    question = "How many thousand people live in Paris and Rome together?"
    print(question)
    state = agent.run(question, temperature=0, budget=Budget(tokens=1200))
    print(state["answer"].strip())
    print(f"{state.usage.sampled_tokens} tokens sampled, {state.usage.forced_tokens} forced by the tools' schemas")


if __name__ == "__main__":
    main()
