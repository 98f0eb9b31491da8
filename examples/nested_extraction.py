"""Nested extraction from free text: objects within lists within an object, as dataclasses.

The example in the prompt is computed once for all letters. Every answer is complete, whatever the model writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

import plait
from plait import gen

EXAMPLE = """\
The order in a letter, as JSON.

Letter: Please send two red cups and 1 blue plate to Mary Hill in Leeds. She pays by card.
JSON: {"customer": {"name": "Mary Hill", "town": "Leeds"}, "items": [{"article": "red cup", "count": 2}, \
{"article": "blue plate", "count": 1}], "payment": "card"}

"""
LETTERS = [
    "I am John Wood of Bristol. I would like 4 green chairs and 2 round tables, and pay by bank transfer.",
    "Anna Bell in York orders 6 silver spoons. She pays in cash.",
]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=24)]


@dataclass
class Customer:
    name: Text
    town: Text


@dataclass
class Item:
    article: Text
    count: Annotated[int, msgspec.Meta(ge=1, le=99)]


@dataclass
class Order:
    customer: Customer
    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=4)]
    payment: Literal["card", "cash", "transfer"]


ORDER = gen("order", type=Order, max_tokens=128)


@plait.function
def extract(s: plait.ProgramState, letter: str) -> None:
    s += EXAMPLE + f"Letter: {letter}\nJSON: " + ORDER


def main() -> None:
    for state in extract.run_batch([{"letter": letter} for letter in LETTERS], temperature=0):
        order = state[ORDER]  # an Order, to type checkers too
        print(f"{order.customer.name}, {order.customer.town}, pays by {order.payment}")
        for item in order.items:
            print(f"  {item.count} x {item.article}")


if __name__ == "__main__":
    main()
