"""What guessing from the text is worth: the same work with and without it, in turns, on two runtimes.

    python benchmarks/prompt_lookup.py [--rounds 3] [--streams 1,8]

Quotes and edits of code repeat their prompt; prose does not. Greedy, so both give the same tokens but for rounding. An
edit ends with its fence or with its text, whichever the model writes first: a small model edits badly, but does edit.

Knows: the runtime's client. Must not know: how guesses are made or verified.
"""

from __future__ import annotations

import argparse
import statistics
import time

from plait.runtime.client.client import Client
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

DOCUMENT = """The lighthouse at Cape Merrow was built in 1874 by the engineer Ada Lindqvist. Its tower is 41 metres
tall and made of granite blocks that were shipped from the island of Varn. The lamp burned whale oil until 1902, when
it was replaced by an electric arc light with a range of 32 kilometres. The keeper's house was abandoned in 1961."""
CODE = """def total(items, rate):
    result = 0
    for item in items:
        price = item.price * item.count
        if item.is_taxed:
            price = price + price * rate
        result = result + price
    return result


def mean(items, rate):
    if not items:
        return 0
    result = total(items, rate) / len(items)
    return result


def report(items, rate):
    print("items:", len(items))
    print("total:", total(items, rate))
    print("mean:", mean(items, rate))
"""
TABLES = """CREATE TABLE users (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    email TEXT NOT NULL,
    created_at TIMESTAMP
);

CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    user_id INTEGER REFERENCES users(id),
    total REAL NOT NULL,
    created_at TIMESTAMP
);
"""
TESTS = """def test_add():
    basket = Basket("ada", 0.1)
    basket.add("apple", 3)
    basket.add("pear", 2)
    assert basket.count() == 5
    assert basket.price() == 11


def test_remove():
    basket = Basket("ada", 0.1)
    basket.add("apple", 3)
    basket.remove("apple")
    assert basket.count() == 0
    assert basket.price() == 0
"""


def chat(request: str, answer: str = "") -> str:
    return f"<|im_start|>user\nRequest {{number}}: {request}<|im_end|>\n<|im_start|>assistant\n{answer}"


def edit(request: str, language: str, code: str, begun: str = "") -> str:
    return chat(f"{request}\n```{language}\n{code}```", f"```{language}\n{begun}")


PROMPTS = {
    "a quote from a document": f'{{number}}. {DOCUMENT}\n\nThe document says: "The lighthouse at Cape Merrow was',
    "an answer that quotes": chat(f"{DOCUMENT}\n\nWhat does the document say about the tower and the lamp? Quote it."),
    "edit: rename, begun": edit(
        "Rename the variable `result` to `amount`:", "python", CODE, "def total(items, rate):\n    amount = 0\n"
    ),
    "edit: rename": edit("Rename the variable `result` to `amount`:", "python", CODE),
    "edit: tables": edit("Rename the column `created_at` to `made_at`:", "sql", TABLES),
    "edit: a test": edit("Add a test for `clear`:", "python", TESTS),
    "a story": "{number}. Once upon a time, in a village between two mountains, a girl could talk to the wind.",
    "an answer": "{number}. Question: Why is the sky blue during the day and red in the evening?\nAnswer:",
    "an explanation": chat("Explain how a bicycle stays upright."),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side, in turns")
    parser.add_argument("--streams", default="1,8", help="texts at once, several numbers with commas")
    options = parser.parse_args()
    with Runtime(prompt_lookup=False) as plain, Runtime() as guessing:
        for streams in map(int, options.streams.split(",")):
            for name, prompt in PROMPTS.items():
                compare(name, prompt, plain.client, guessing.client, streams, options.rounds)


def compare(name: str, prompt: str, plain: Client, guessing: Client, streams: int, rounds: int) -> None:
    ratios, speeds, same, share = [], [], True, 0.0
    for round_number in range(rounds + 1):  # the first warms up
        spent, without = once(plain, prompt, streams)
        spent_guessing, results = once(guessing, prompt, streams)
        num_tokens = sum(len(result.token_ids) for result in results)
        num_without = sum(len(result.token_ids) for result in without)
        share = sum(result.usage.drafted_tokens for result in results) / num_tokens
        same = same and [result.token_ids for result in results] == [result.token_ids for result in without]
        if round_number:
            speeds.append(num_tokens / spent_guessing)
            ratios.append(speeds[-1] * spent / num_without)
    print(
        f"{name:24} {streams:2} streams: {statistics.median(speeds):6.0f} tok/s, {statistics.median(ratios):.2f} times "
        f"as fast ({min(ratios):.2f} to {max(ratios):.2f}); {share:.0%} guessed; "
        f"tokens {'equal' if same else 'differ'}",
        flush=True,
    )


def once(client: Client, prompt: str, streams: int) -> tuple[float, list]:
    sessions = [client.open_session() for _ in range(streams)]
    begun = time.perf_counter()
    calls = []
    for number, session in enumerate(sessions):
        session.append(prompt.format(number=number), control=True)
        is_chat, stop = prompt.startswith("<|"), ["```"] if "```" in prompt else []
        params = sampling_params(max_tokens=120, temperature=0.0, stop=stop, ignore_eos=not is_chat)
        calls.append(session.generate(params))
    results = [call.result() for call in calls]
    spent = time.perf_counter() - begun
    for session in sessions:
        session.close()
    return spent, results


if __name__ == "__main__":
    main()
