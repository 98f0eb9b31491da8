"""How often a text that is cut inside a word goes on as the uncut text does, with token healing and without.

For each text and place of a cut, the model continues the uncut text (up to the next border of a word) and the cut one,
greedily. Counted is how often the cut text and its continuation begin with the uncut text.

    python benchmarks/token_healing.py
"""

from __future__ import annotations

from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "The link is https://www.example.com/index.html and it works.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "Water boils at a temperature of one hundred degrees Celsius.",
    "Once upon a time there was a little girl who lived in a village.",
    "def add(first, second):\n    return first + second\n",
)


def main() -> None:
    """Prints the counts for cuts behind each letter, and for those behind a space."""
    with Engine(deterministic=True) as engine:
        tokenizer = engine.client.tokenizer
        counts: dict[tuple[str, bool], list[bool]] = {}
        for text in TEXTS:
            ids = tokenizer.encode_plain(text)
            ends = [len(tokenizer.decode(ids[: count + 1])) for count in range(len(ids))]
            for size in range(12, len(text)):
                end = next(end for end in ends if end >= size)
                if end == size:
                    continue  # the cut is at the border of a token
                kind = "behind a space" if text[size - 1] == " " else "inside a word"
                for healing in (False, True):
                    session = engine.client.open_session()
                    session.append(text[:size])
                    sampling = sampling_params(max_tokens=4, temperature=0.0, token_healing=healing)
                    written = text[:size] + session.generate(sampling).result().text
                    session.close()
                    counts.setdefault((kind, healing), []).append(written.startswith(text[:end]))
    for (kind, healing), found in counts.items():
        name = "healed" if healing else "not healed"
        print(f"{kind}, {name}: {sum(found)} of {len(found)} go on with the rest of the cut token")


if __name__ == "__main__":
    main()
