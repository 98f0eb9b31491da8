"""Extracts facts from documents as typed objects: every answer is valid and is converted to an object of its class.

The prompt begins with two examples, which are computed once for all documents. Without them a very small model guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

import plait
from plait import gen

EXAMPLES = """\
The seller, the number of items and the total of invoices, as JSON.

Invoice: Receipt of Anna's Bakery, 3 March 2022. 4 cakes. To pay within 7 days: 36 pounds.
JSON: {"seller": "Anna's Bakery", "number_of_items": 4, "total": "36 pounds"}

Invoice: Hill Books Ltd thanks you for buying 3 books. Please pay 52 euros by 9 May.
JSON: {"seller": "Hill Books Ltd", "number_of_items": 3, "total": "52 euros"}

"""
DOCUMENTS = [
    "Invoice from Miller & Sons, May 2023. 2 chairs. Total: 179 euros. Payable within 30 days.",
    "Thank you for your order at Blue Lamp Ltd! Your total on 2024-01-31 is 240 dollars for three lamps.",
]


@dataclass
class Invoice:
    seller: Annotated[str, msgspec.Meta(max_length=40)]
    number_of_items: Annotated[int, msgspec.Meta(ge=1, le=99)]
    total: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,5} (euros|dollars|pounds)$")]


INVOICE = gen("invoice", type=Invoice, max_tokens=96)


@plait.function
def extract(s: plait.ProgramState, document: str) -> None:
    s += EXAMPLES + f"Invoice: {document}\nJSON: " + INVOICE


def main() -> None:
    for state in extract.run_batch([{"document": document} for document in DOCUMENTS], temperature=0):
        invoice = state[INVOICE]  # an Invoice, to type checkers too
        print(f"{invoice.seller}: {invoice.number_of_items} items, {invoice.total}")
        usage = state.usage
        print(f"  {usage.sampled_tokens} tokens sampled, {usage.forced_tokens} forced")


if __name__ == "__main__":
    main()
