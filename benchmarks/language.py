"""The overhead of the language itself: the client's time per primitive, the import, the start.

    python benchmarks/language.py [--no-start]

The scheduler is replaced by one that answers at once, and the tokenizer is the model's own. So the times are those of
expressions, states, sessions and tokenizing; no other process takes part. Medians over consecutive primitives of a
program, after so many characters of earlier text:

    ms               0   1,000  10,000  40,000 characters
    append       0.001   0.001   0.001   0.001
    gen + read   0.050   0.050   0.050   0.050
    select + read 0.045  0.045   0.045   0.045
    fork(2)      0.006   0.006   0.006   0.006
    user turn    0.009   0.008   0.009   0.009

`import plait` 0.11 s, start to first token 2.1 s once kernels are compiled (2026-11-21, two quiet cores, Python 3.11).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
USAGE = Usage()


class InstantScheduler:
    """A channel whose scheduler answers every call before `send` returns."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self.welcome = Welcome(PROTOCOL, str(model_path), vocab_size, 1 << 20, 0)
        self._on_reply: Callable[[Any], None] = lambda reply: None

    def start(self, on_reply: Callable[[Any], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply = on_reply

    def send(self, request: Any) -> None:
        if isinstance(request, Generate):
            self._on_reply(Tokens(request.call, [260, 270, 280]))
            self._on_reply(Finished(request.call, "stop", USAGE))
        elif isinstance(request, Select):
            scores = ChoiceScores(0, [-1.0, -2.0], [[-1.0], [-2.0]])
            self._on_reply(Finished(request.call, "stop", USAGE, choice=scores))

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return condition.wait_for(ready, timeout_s)

    def pump(self) -> None:
        pass

    def close(self) -> None:
        pass


def append(s: plait.ProgramState) -> None:
    s += "and then there was some more text, "


def gen_and_read(s: plait.ProgramState) -> None:
    s += " Then:" + gen("x", max_tokens=8, temperature=0, stop="\n")
    s["x"]


def select_and_read(s: plait.ProgramState) -> None:
    s += " It is " + select("y", ["yes", "no"])
    s["y"]


def fork_of_two(s: plait.ProgramState) -> None:
    s.fork(2)


def user_turn(s: plait.ProgramState) -> None:
    s += plait.user("What is the capital of France?")


PRIMITIVES = (append, gen_and_read, select_and_read, fork_of_two, user_turn)


@plait.function
def measured(s: plait.ProgramState, length: int, primitive: Callable[[plait.ProgramState], None]) -> list[float]:
    """Returns the seconds that each of several `primitive`s takes after `length` characters of earlier text."""
    story = (SENTENCE * (length // len(SENTENCE) + 1))[:length]
    if primitive is user_turn:
        s += plait.user(story) + plait.assistant(gen("before"))
    else:
        s += "Once. " + story + gen("before")
    times = []
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
    for primitive in PRIMITIVES:
        medians = []
        for length in LENGTHS:
            runs = [measured.run(length, primitive, backend=client).ret_value for _ in range(PROGRAMS)]
            medians.append(1e3 * statistics.median(seconds for times in runs for seconds in times))
        print(f"{primitive.__name__:>20}" + "".join(f"{median:>10.3f}" for median in medians))


def print_import() -> None:
    code = "import time; t = time.perf_counter(); import plait; print(time.perf_counter() - t)"
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    print(f"{'import plait':>20}{statistics.median(times):>10.3f} s")


def print_start() -> None:
    """From the start of Python to the first piece of an answer by the embedded model."""
    code = (
        "import plait\n"
        "def body(s): s += 'The capital of France is' + plait.gen('x', max_tokens=4, temperature=0)\n"
        "next(plait.function(body).run(stream=True).text_iter('x')); print('there', flush=True)\n"
    )
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "there\n":
            sys.exit("the program gave no token")
        took = time.perf_counter() - start
    print(f"{'start to first token':>20}{took:>10.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the language itself costs.")
    parser.add_argument("--no-start", action="store_true", help="skip the measurement that loads the model")
    options = parser.parse_args()
    print_import()
    print_primitives()
    if not options.no_start:
        print_start()


if __name__ == "__main__":
    main()
