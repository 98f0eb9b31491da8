"""The SGLang paper's programs through plait, against the same programs as fresh requests to an OpenAI server.

    python benchmarks/programs.py                                     # the peer is our own `plait serve`
    python benchmarks/programs.py --peer http://localhost:8000/v1 --dialect vllm

Each program of examples/ runs with caches emptied before, in turns on both sides: wall time, prompt tokens that were
computed, and the cache's hits beside the best possible (paper/best.py). The peer's side posts each call's whole text,
calls of branches and batches side by side (paper/fresh.py), as a client of that server would. Greedy, but the two sides
tokenize differently where calls meet, so answers, and with them a few tokens, may differ.

What the cache costs where nothing is shared is measured in process: the seconds in the radix tree and the page pool, of
them and those of the forward passes.

SmolLM2-135M in bf16, two cores shared with many other jobs (load 7), one round each, 2026-11-21; the peer is our own
server, which has the same cache, so what is left of the difference is HTTP, tokenizing, and waiting between calls. The
seconds are noisy; the counts are not.

                     plait      peer        computed    peer   cached  of best
    multiple choice     2.29 s    2.98 s   1.30x     683     683    72.3%   100.0%
    endings             0.36 s    0.55 s   1.52x      31      31     0.0%   100.0%
    react              15.34 s   14.65 s   0.96x     657     665    84.0%    99.9%
    agents              4.12 s    7.28 s   1.77x     512     512    73.5%    99.6%
    tree of thought     8.48 s    7.42 s   0.87x     249     249    81.0%   100.3%
    skeleton           12.15 s   12.51 s   1.03x     207     227    76.7%   100.0%
    judge               2.44 s    3.20 s   1.31x     379     380    75.3%   100.4%
    extraction          0.61 s    1.13 s   1.85x     108     108    15.6%   100.0%
    chat                7.17 s    6.43 s   0.90x      77      77    73.8%   101.4%
    nothing shared      4.08 s    4.24 s   1.04x   1,208   1,208     0.0%   100.0%

With packed weights, the median of three rounds, load 5, the answers' tokens beside them:

                     plait      peer            said    peer  computed    peer   cached  of best
    judge               2.01 s    1.60 s   0.80x     216     216       378     378    75.3%   100.0%
    extraction          0.46 s    0.42 s   0.92x      61      61       108     108    15.6%   100.0%
    chat                1.04 s    1.45 s   1.39x      81      81        77      77    75.2%   100.0%

The cache's cost where nothing is shared: 0.06%. (Above 100%: the best was then counted without the last token of
answers that ended by themselves.) Against vLLM it was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from paper.best import Sent
from paper.fresh import FreshRequests
from paper.workloads import Work, workloads

import plait

SERVE = [sys.executable, "-c", "from plait.cli import main; main()", "serve", "--port"]
CACHE = ("activate", "extend_from_cache", "allocate", "publish_early", "publish", "release", "forget", "fork", "peek")


@contextlib.contextmanager
def own_server(port: int) -> Iterator[str]:
    """`plait serve` on the embedded model, until the block ends."""
    server = subprocess.Popen([*SERVE, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=1):
                break
            time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        server.terminate()
        server.wait()


class Took(NamedTuple):
    """One run from an empty cache. `said` are tokens of answers: where they differ, so does the time."""

    seconds: float
    prompt: int
    computed: int
    said: int


def timed(work: Work, backend: Any) -> Took:
    """Empties the cache, runs and counts. Raises the first error of a program."""
    backend.flush_cache()
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        states = work(backend)
    wall = time.perf_counter() - start
    for state in states:
        if state.error() is not None:
            raise state.error()
    usages = [state.usage for state in states]
    counts = [(u.prompt_tokens, u.computed_tokens, u.completion_tokens) for u in usages]
    return Took(wall, *(sum(column) for column in zip(*counts, strict=True)))


def compare(name: str, work: Work, client: Any, peer: FreshRequests, rounds: int) -> None:
    timed(work, client), timed(work, peer)  # grammars are compiled, kernels warm
    ours, theirs, shares = [], [], []
    for _ in range(rounds):
        sent = Sent(client)
        ours.append(timed(work, client))
        sent.stop()
        best = sent.best_cached_tokens()
        shares.append((ours[-1].prompt - ours[-1].computed) / best if best else 1.0)
        theirs.append(timed(work, peer))
    mine, other, share = sorted(ours)[rounds // 2], sorted(theirs)[rounds // 2], sorted(shares)[rounds // 2]
    print(
        f"{name:16}{mine.seconds:8.2f} s{other.seconds:8.2f} s{other.seconds / mine.seconds:7.2f}x"
        f"{mine.said:8,}{other.said:8,}{mine.computed:10,}{other.computed:8,}"
        f"{1 - mine.computed / mine.prompt:9.1%}{share:9.1%}",
        flush=True,
    )


def cost_of_sharing_nothing(work: Work) -> float:
    """The share of the scheduler's working time that the prefix cache takes where it finds nothing."""
    spent, depth = 0.0, 0
    with plait.Engine() as engine:
        work(engine)
        engine.client.flush_cache()
        cache, steps = engine.scheduler.cache, [0.0]

        def clocked(method: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal spent, depth
                depth += 1
                start = time.perf_counter()
                try:
                    return method(*arguments, **named)
                finally:
                    depth -= 1
                    spent += (time.perf_counter() - start) if not depth else 0.0

            return call

        for name in CACHE:
            setattr(cache, name, clocked(getattr(cache, name)))
        runner = engine.scheduler.model_runner
        forward = runner.forward

        def clocked_forward(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = forward(*arguments, **named)
            steps[0] += time.perf_counter() - start
            return result

        runner.forward = clocked_forward
        work(engine)
        return spent / (steps[0] + spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="URL", help="the base URL of an OpenAI server; default: our own")
    parser.add_argument("--dialect", choices=["plait", "vllm"], default="plait", help="how the peer takes constraints")
    parser.add_argument("--model", help="what plait runs; the peer must serve the same. Default: the embedded model")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", type=int, default=4, help="scales the number of items")
    parser.add_argument("--port", type=int, default=31877)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    options = parser.parse_args()
    works = {name: work for name, work in workloads(options.size).items() if not options.only or name in options.only}
    with plait.Runtime(options.model, progress=False) as runtime, contextlib.ExitStack() as stack:
        url = options.peer or stack.enter_context(own_server(options.port))
        peer = FreshRequests(url, runtime.client.tokenizer, options.dialect)
        if not peer.flush_cache():
            print("the peer's cache cannot be emptied: what earlier rounds left in it is counted for it")
        head = f"{'plait':>10}{'peer':>10}{'':8}{'said':>8}{'peer':>8}{'computed':>10}{'peer':>8}"
        print(f"{'':16}{head}{'cached':>9}{'of best':>9}")
        for name, work in works.items():
            compare(name, work, runtime.client, peer, options.rounds)
    if "nothing shared" in works:
        print(f"the cache's cost where nothing is shared: {cost_of_sharing_nothing(works['nothing shared']):.2%}")


if __name__ == "__main__":
    main()
