"""What guessing from the text is worth: the same work with and without it, in turns, on two runtimes.

    python benchmarks/prompt_lookup.py [--rounds 3]

Quoting and editing repeat their prompt; prose does not. Greedy, so both give the same tokens but for rounding.

Knows: the runtime's client. Must not know: how guesses are made or verified.
"""

from __future__ import annotations

import argparse
import statistics
import time

from plait.runtime.client.client import Client
from plait.runtime.launch import Runtime
from plait.runtime.sampling import sampling_params

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
"""
PROMPTS = {
    "a quote from a document": f'{DOCUMENT}\n\nThe document says, word for word: "The lighthouse at Cape Merrow was',
    "a code edit": f"{CODE}\nThe same function, with `result` renamed to `total_price`:\n\ndef total(items, rate):\n",
    "a story": "Once upon a time, in a village between two mountains, there lived a girl who could talk to the wind.",
    "an answer": "Question: Why is the sky blue during the day and red in the evening?\nAnswer:",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side; the medians are compared")
    parser.add_argument("--streams", default="1,8", help="texts at once, several numbers with commas")
    options = parser.parse_args()
    with Runtime(prompt_lookup=False) as plain, Runtime() as guessing:
        for streams in map(int, options.streams.split(",")):
            for name, prompt in PROMPTS.items():
                compare(name, prompt, plain.client, guessing.client, streams, options.rounds)


def compare(name: str, prompt: str, plain: Client, guessing: Client, streams: int, rounds: int) -> None:
    speeds: dict[bool, list[float]] = {False: [], True: []}
    same, share = True, 0.0
    for round_number in range(rounds + 1):  # the first warms up
        texts = []
        for guesses, client in ((False, plain), (True, guessing)):
            spent, results = once(client, prompt, streams)
            texts.append([result.token_ids for result in results])
            if round_number:
                speeds[guesses].append(sum(len(result.token_ids) for result in results) / spent)
            share = sum(r.usage.drafted_tokens for r in results) / sum(len(r.token_ids) for r in results)
        same = same and texts[0] == texts[1]
    without, with_guesses = statistics.median(speeds[False]), statistics.median(speeds[True])
    print(
        f"{name:24} {streams:2} streams: {without:6.1f} -> {with_guesses:6.1f} tok/s, "
        f"ratio {with_guesses / without:.2f}; {share:.0%} guessed; tokens {'equal' if same else 'differ'}"
    )


def once(client: Client, prompt: str, streams: int) -> tuple[float, list]:
    sessions = [client.open_session() for _ in range(streams)]
    begun = time.perf_counter()
    calls = []
    for number, session in enumerate(sessions):
        session.append(f"{number}. {prompt}")
        calls.append(session.generate(sampling_params(max_tokens=100, temperature=0.0, ignore_eos=True)))
    results = [call.result() for call in calls]
    spent = time.perf_counter() - begun
    for session in sessions:
        session.close()
    return spent, results


if __name__ == "__main__":
    main()
