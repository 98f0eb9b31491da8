"""What drafts save: the same work without them, with prompt lookup only, and with all proposers, alternating.

    python benchmarks/drafts.py [--only extraction] [--rounds 3] [--streams 1,8] [--records 200]

Prints for each workload the steps, the tokens that the model computed, the accepted draft tokens, the processor time
and the wall time, each relative to no drafts. Quotes and edits of code repeat their prompt; prose does not. The
extraction fills a JSON schema for each of many records; the agent chooses tools and writes their arguments; the edits
ask for one change after another of one file.
Decoding is greedy, so all give the same tokens except for rounding. The model is small: it edits badly, but does.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from common.options import parsed

from plait.constrained import JsonSchema
from plait.runtime.client.client import Client
from plait.runtime.process.engine import Engine
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
CHAT = "<|im_start|>user\nRequest {number}: {request}<|im_end|>\n<|im_start|>assistant\n"
SETTINGS = {"none": {"drafts": ()}, "lookup": {"drafts": ("prompt",)}, "all": {}}
NAMES, SURNAMES = ("Ada", "Boris", "Carla", "Dmitri", "Elena", "Farid"), ("Lindqvist", "Okafor", "Moreau", "Tanaka")
ROLES = ("engineer", "designer", "accountant", "lawyer")
CITIES = {"Lisbon": "Portugal", "Lyon": "France", "Osaka": "Japan", "Oslo": "Norway", "Porto": "Portugal"}
TEXT = {"type": "string"}
FIELDS = {"name": TEXT, "age": {"type": "integer"}, "role": {"enum": [*ROLES, "other"]}, "city": TEXT, "country": TEXT}
FIELDS |= {"email": TEXT, "is_employed": {"type": "boolean"}}


def record(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


PERSON = JsonSchema(record(FIELDS))
TOOLS = {
    "search_flights": ("origin", "destination", "date"),
    "book_hotel": ("city", "nights", "date"),
    "get_weather": ("city", "date"),
}
CALLS = [
    record({"tool": {"const": tool}, "arguments": record(dict.fromkeys(names, TEXT))}) for tool, names in TOOLS.items()
]
CALL = JsonSchema({"anyOf": CALLS})
Work = tuple[str, JsonSchema | None]  # a prompt, and what its answer has to match


def one_prompt(prompt: str) -> Callable[[int], Iterator[Work]]:
    return lambda count: ((prompt.format(number=number), None) for number in range(count))


def extraction(count: int) -> Iterator[Work]:
    rng = random.Random(0)
    for number in range(count):
        name, city = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}", rng.choice(list(CITIES))
        text = (
            f"{name} is {rng.randint(20, 64)} years old, lives in {city}, {CITIES[city]}, and works as "
            f"{rng.choice(ROLES)}. Mail: {name.lower().replace(' ', '.')}@example.com"
        )
        yield CHAT.format(number=number, request=f"Extract the person of this record as JSON.\n{text}"), PERSON


def agent(count: int) -> Iterator[Work]:
    rng = random.Random(1)
    tools = "; ".join(f"{tool}({', '.join(names)})" for tool, names in TOOLS.items())
    for number in range(count):
        cities, date = rng.sample(list(CITIES), 2), f"2026-12-{rng.randint(1, 28):02}"
        task = rng.choice(
            [
                f"Find a flight from {cities[0]} to {cities[1]} on {date}.",
                f"Book a hotel in {cities[0]} for {rng.randint(1, 5)} nights from {date}.",
                f"How is the weather in {cities[0]} on {date}?",
            ]
        )
        request = f"Tools: {tools}. Answer with one call as JSON. {task}"
        yield CHAT.format(number=number, request=request), CALL


def edits(count: int) -> Iterator[Work]:
    changes = ("Rename `result` to `amount`", "Add a docstring to `mean`", "Round the mean", "Print the rate too")
    for number in range(count):
        request = f"{changes[number % len(changes)]}:\n```python\n{CODE}```"
        yield CHAT.format(number=number, request=request) + "```python\n", None


PROMPTS = {
    "a quote from a document": f'{{number}}. {DOCUMENT}\n\nThe document says: "The lighthouse at Cape Merrow was',
    "a story": "{number}. Once upon a time, in a village between two mountains, a girl could talk to the wind.",
    "an answer": "{number}. Question: Why is the sky blue during the day and red in the evening?\nAnswer:",
    "an explanation": CHAT.replace("{request}", "Explain how a bicycle stays upright."),
}
MANY: dict[str, Callable[[int], Iterator[Work]]] = {"extraction": extraction, "agent": agent, "edits": edits}


def main() -> None:
    options = parsed(__doc__, only="", rounds=3, streams="1", records=200)
    engines = {name: Engine(**settings) for name, settings in SETTINGS.items()}
    for streams in map(int, options.streams.split(",")):
        few = {name: one_prompt(prompt)(streams * (options.rounds + 1)) for name, prompt in PROMPTS.items()}
        many = {name: works_of(options.records) for name, works_of in MANY.items()}
        for name, works in (few | many).items():
            if options.only in name:
                compare(name, list(works), engines, streams)
    for engine in engines.values():
        engine.shutdown()


def compare(name: str, works: list[Work], engines: dict[str, Engine], streams: int) -> None:
    totals: dict[str, Counter[str]] = {mode: Counter() for mode in engines}
    ratios: dict[str, list[float]] = {mode: [] for mode in engines}
    num_different = 0
    for first in range(0, len(works), streams):
        outcomes = {mode: run_once(engine.client, works[first : first + streams]) for mode, engine in engines.items()}
        if first == 0:
            continue  # the warm-up
        for mode, (counts, outputs) in outcomes.items():
            totals[mode] += counts
            num_different += outputs != outcomes["none"][1]
            ratios[mode].append(outcomes["none"][0]["wall_us"] / counts["wall_us"])
    print(f"{name}, {streams} streams, {totals['none']['tokens']} tokens; {num_different} rounds differ")
    for mode, counts in totals.items():
        fewer, cpu, wall = (totals["none"][unit] / counts[unit] for unit in ("steps", "cpu_us", "wall_us"))
        print(
            f"    {mode:7}{counts['steps']:6} steps ({fewer:.2f} x fewer), {counts['computed']} computed, "
            f"{counts['drafted']} drafted, {counts['forced']} forced, processor {counts['cpu_us'] / 1e6:.2f} s "
            f"({cpu:.2f} x), wall {counts['wall_us'] / 1e6:.2f} s ({wall:.2f} x, "
            f"median {statistics.median(ratios[mode]):.2f} x)",
            flush=True,
        )


def run_once(client: Client, works: list[Work]) -> tuple[Counter[str], list[list[int]]]:
    sessions = [client.open_session() for _ in works]
    before = client.status()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    calls = []
    for session, (prompt, constraint) in zip(sessions, works, strict=True):
        session.append(prompt, control=True)
        is_chat, stop = prompt.startswith("<|"), ["```"] if "```" in prompt else []
        params = sampling_params(max_tokens=160, temperature=0.0, stop=stop, ignore_eos=not is_chat)
        calls.append(session.generate(params, constraint))
    results = [call.result() for call in calls]
    after = client.status()
    counts = Counter(
        wall_us=round(1e6 * (time.perf_counter() - start_s)),
        cpu_us=round(1e6 * (time.process_time() - start_cpu_s)),
        steps=after.steps - before.steps,
        computed=after.computed_tokens - before.computed_tokens,
        tokens=sum(len(result.token_ids) for result in results),
        drafted=sum(result.usage.drafted_tokens for result in results),
        forced=sum(result.usage.forced_tokens for result in results),
    )
    for session in sessions:
        session.close()
    return counts, [result.token_ids for result in results]


if __name__ == "__main__":
    main()
