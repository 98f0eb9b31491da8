"""The overhead of the language itself: the client's time per primitive, the import, the start.

    python benchmarks/language.py [--no-start]     (do not load the model)

The scheduler is replaced by one that answers at once, and the tokenizer is the model's own. So the times are those of
expressions, states, sessions and tokenizing; no other process takes part. Medians over consecutive primitives of a
program, after so many characters of earlier text.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.options import parsed

import plait
from plait import gen, select
from plait.runtime.call_reports import ChoiceScores, Usage
from plait.runtime.client.client import Client
from plait.runtime.messages import PROTOCOL, Finished, Generate, Select, Tokens, Welcome
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer

LENGTHS = (0, 1_000, 10_000, 40_000)  # characters before the primitive
PROGRAMS, WARM_UPS, IN_ONE_PROGRAM = 20, 3, 20
SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody minds. "


class InstantScheduler:
    """A channel whose scheduler answers every call before `send` returns."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self.welcome = Welcome(PROTOCOL, str(model_path), vocab_size, 1 << 20, 0)

    def start(self, on_reply: Callable[[Any], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply = on_reply

    def send(self, request: Any) -> None:
        if isinstance(request, Generate):
            self._on_reply(Tokens(request.call, [260, 270, 280]))
            self._on_reply(Finished(request.call, "stop", Usage()))
        elif isinstance(request, Select):
            scores = ChoiceScores(0, [-1.0, -2.0], [[-1.0], [-2.0]])
            self._on_reply(Finished(request.call, "stop", Usage(), choice=scores))

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return condition.wait_for(ready, timeout_s)

    def pump(self) -> None: ...

    def close(self) -> None: ...


def gen_and_read(s: plait.ProgramState) -> None:
    s += " Then:" + gen("x", max_tokens=8, temperature=0, stop="\n")
    s["x"]


def select_and_read(s: plait.ProgramState) -> None:
    s += " It is " + select("y", ["yes", "no"])
    s["y"]


PRIMITIVES: dict[str, Callable[[plait.ProgramState], Any]] = {
    "append": lambda s: s.__iadd__("and then there was some more text, "),
    "gen + read": gen_and_read,
    "select + read": select_and_read,
    "fork(2)": lambda s: s.fork(2),
    "user turn": lambda s: s.__iadd__(plait.user("What is the capital of France?")),
}


@plait.function
def measured(s: plait.ProgramState, length: int, name: str) -> list[float]:
    """Returns the seconds that each of several primitives takes after `length` characters of earlier text."""
    story, primitive, times = (SENTENCE * (length // len(SENTENCE) + 1))[:length], PRIMITIVES[name], list[float]()
    if name == "user turn":
        s += plait.user(story) + plait.assistant(gen("before"))
    else:
        s += "Once. " + story + gen("before")
    for _ in range(WARM_UPS + IN_ONE_PROGRAM):
        start = time.perf_counter()
        primitive(s)
        times.append(time.perf_counter() - start)
    return times[WARM_UPS:]


def print_primitives() -> None:
    model_path = locate_model()
    tokenizer = load_tokenizer(model_path)
    client = Client(InstantScheduler(model_path, tokenizer.vocab_size), tokenizer)
    print(f"{'milliseconds, after':>20}" + "".join(f"{length:>10}" for length in LENGTHS) + "  characters")
    for name in PRIMITIVES:
        print(f"{name:>20}", end="")
        for length in LENGTHS:
            runs = [measured.run(length, name, backend=client).ret_value for _ in range(PROGRAMS)]
            print(f"{1e3 * statistics.median(seconds for times in runs for seconds in times):>10.3f}", end="")
        print()


def seconds_of(code: str) -> float:
    """From the start of Python to the first line of its output."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            sys.exit("the program printed nothing")
        return time.perf_counter() - start


def main() -> None:
    options = parsed(__doc__, no_start=False)
    nothing, imported = (
        statistics.median(seconds_of(f"{code}print(1, flush=True)") for _ in range(5)) for code in ("", "import plait;")
    )
    print(f"{'import plait':>20}{imported - nothing:>10.3f} s")
    print_primitives()
    if not options.no_start:
        program = "s.__iadd__('The capital of France is' + plait.gen('x', max_tokens=4, temperature=0))"
        answer = f"plait.function(lambda s: {program}).run(stream=True).text_iter('x')"
        print(f"{'start to first token':>20}{seconds_of(f'import plait; print(next({answer}), flush=True)'):>10.3f} s")


if __name__ == "__main__":
    main()
