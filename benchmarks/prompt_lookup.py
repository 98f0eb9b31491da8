"""The speedup of prompt lookup decoding: the same work with and without it, alternating between two runtimes.

    python benchmarks/prompt_lookup.py [--rounds 3] [--streams 1,8]

Quotes and edits of code repeat their prompt; prose does not. Decoding is greedy, so both give the same tokens except
for rounding. An edit ends at its closing fence or at end of sequence. The model is small: it edits badly, but does.
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


def chat_prompt(request: str, answer: str = "") -> str:
    return f"<|im_start|>user\nRequest {{number}}: {request}<|im_end|>\n<|im_start|>assistant\n{answer}"


def edit_prompt(request: str, language: str, code: str, output_prefix: str = "") -> str:
    return chat_prompt(f"{request}\n```{language}\n{code}```", f"```{language}\n{output_prefix}")


PROMPTS = {
    "a quote from a document": f'{{number}}. {DOCUMENT}\n\nThe document says: "The lighthouse at Cape Merrow was',
    "an answer that quotes": chat_prompt(
        f"{DOCUMENT}\n\nWhat does the document say about the tower and the lamp? Quote it."
    ),
    "edit: rename, begun": edit_prompt(
        "Rename the variable `result` to `amount`:", "python", CODE, "def total(items, rate):\n    amount = 0\n"
    ),
    "edit: rename": edit_prompt("Rename the variable `result` to `amount`:", "python", CODE),
    "edit: tables": edit_prompt("Rename the column `created_at` to `made_at`:", "sql", TABLES),
    "edit: a test": edit_prompt("Add a test for `clear`:", "python", TESTS),
    "a story": "{number}. Once upon a time, in a village between two mountains, a girl could talk to the wind.",
    "an answer": "{number}. Question: Why is the sky blue during the day and red in the evening?\nAnswer:",
    "an explanation": chat_prompt("Explain how a bicycle stays upright."),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each runtime")
    parser.add_argument("--streams", default="1,8", help="concurrent texts, several numbers with commas")
    options = parser.parse_args()
    with Runtime(prompt_lookup=False) as plain, Runtime() as drafting:
        for streams in map(int, options.streams.split(",")):
            for name, prompt in PROMPTS.items():
                compare(name, prompt, plain.client, drafting.client, streams, options.rounds)


def compare(name: str, prompt: str, plain: Client, drafting: Client, streams: int, rounds: int) -> None:
    speedups, speeds, is_equal, drafted_share = [], [], True, 0.0
    for round_number in range(rounds + 1):  # round 0 is the warm-up
        seconds_plain, plain_results = run_once(plain, prompt, streams)
        seconds_drafting, results = run_once(drafting, prompt, streams)
        num_tokens = sum(len(result.token_ids) for result in results)
        num_plain = sum(len(result.token_ids) for result in plain_results)
        drafted_share = sum(result.usage.drafted_tokens for result in results) / num_tokens
        is_equal = is_equal and [result.token_ids for result in results] == [
            result.token_ids for result in plain_results
        ]
        if round_number:
            speeds.append(num_tokens / seconds_drafting)
            speedups.append(speeds[-1] * seconds_plain / num_plain)
    print(
        f"{name:24} {streams:2} streams: {statistics.median(speeds):6.0f} tok/s, "
        f"{statistics.median(speedups):.2f} times as fast ({min(speedups):.2f} to {max(speedups):.2f}); "
        f"{drafted_share:.0%} drafted; tokens {'equal' if is_equal else 'differ'}",
        flush=True,
    )


def run_once(client: Client, prompt: str, streams: int) -> tuple[float, list]:
    sessions = [client.open_session() for _ in range(streams)]
    start = time.perf_counter()
    calls = []
    for number, session in enumerate(sessions):
        session.append(prompt.format(number=number), control=True)
        is_chat, stop = prompt.startswith("<|"), ["```"] if "```" in prompt else []
        params = sampling_params(max_tokens=120, temperature=0.0, stop=stop, ignore_eos=not is_chat)
        calls.append(session.generate(params))
    results = [call.result() for call in calls]
    seconds = time.perf_counter() - start
    for session in sessions:
        session.close()
    return seconds, results


if __name__ == "__main__":
    main()
