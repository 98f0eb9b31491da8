"""Measures the engine on a GPU: decode, prompts, JSON beside free text, 1,000 chats, and narrow weights.

    python benchmarks/gpu/engine.py decode json shared prefill offline int4 [--shape llama-3-8b]

Runs any of these parts in one process; a part that fails is reported, and the next one starts. Prints one JSON object
per line: {"name", "value", "unit", "goal", ...}, and {"done": part} after each part. Weights are random, which does not
change the times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import machine
import torch
from chat_lengths import chat_lengths
from roofline import Machine, ceiling
from workbench import SHAPES, Workbench, prompts, workbench

from plait.constrained import JsonSchema
from plait.runtime.weights.checkpoint import expected_shapes

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "born": {"type": "string", "format": "date"},
        "years": {"type": "integer", "minimum": 0, "maximum": 60},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "born", "years", "colours"],
    "additionalProperties": False,
}
Figure = dict[str, Any]
COMPILATIONS = machine.CompilationCounter()


def figure(name: str, value: float, unit: str, goal: float | None = None, **more: Any) -> Figure:
    return {"name": name, "value": value, "unit": unit, "goal": goal, **more}


def now(bench: Workbench) -> float:
    """Seconds, with the device's queue empty."""
    if bench.runner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def limits(bench: Workbench) -> tuple[float, float]:
    """(bytes per second of a copy, FLOP/s of a product in the weights' dtype), as measured before any engine."""
    found = machine.limits()
    return found.copy, found.fp8 if bench.runner.weight_format == "as-stored" else found.bf16


def weight_bytes(bench: Workbench) -> int:
    """Of what one token reads: all weights but the embedding's table."""
    return sum(part.nbytes for part in tensors((tuple(bench.runner.model.layers), bench.runner.model.head)))


def tensors(part: Any) -> Iterator[torch.Tensor]:
    """All tensors in a layer's records."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors(each)
    elif hasattr(part, "__dataclass_fields__"):
        yield from tensors(tuple(getattr(part, name) for name in part.__dataclass_fields__))


# -- the parts ------------------------------------------------------------------------------------


def decode(bench: Workbench, device: str) -> Iterator[Figure]:
    bandwidth, _ = limits(bench)
    count, length = (60, 1000) if device != "cpu" else (4, 20)
    for rows, goal in ((64, 0.7), (1, 0.8), (16, None)) if device != "cpu" else ((1, 0.8), (3, 0.7)):
        seconds, before = step_seconds(bench, prompts([length] * rows, bench.runner.config.vocab_size, rows), count)
        name = f"decode, {rows} rows of {length}"
        yield steady(name, bench, before)
        held = sum(len(row.seq) for row in bench.engine_loop.batch_scheduler.running)
        roofline = (weight_bytes(bench) + held * bench.runner.page_bytes) / bandwidth
        yield figure(f"{name}: share of the memory roofline", roofline / seconds, "", goal, step_ms=seconds * 1e3)
        yield figure(f"{name}: output", rows / seconds, "tok/s")
        alone = replay_seconds(bench, rows)
        if alone is not None:
            gap = (seconds - alone) * 1e3
            yield figure(f"{name}: between graphs", gap, "ms", 0.3 if rows == 64 else None, graph_ms=alone * 1e3)
        bench.flush()


def step_seconds(bench: Workbench, texts: list[list[int]], count: int) -> tuple[float, dict[str, int]]:
    """Seconds of a step in which all these rows decode, and the `counts` before the timed steps.

    The rows are decoding still when it returns.
    """
    for text in texts:
        bench.call(text, 5 * count)
    bench.until_decoding()
    for _ in range(10 if bench.runner.device.type == "cuda" else 1):
        bench.step()
    before, begun = counts(bench), now(bench)
    for _ in range(count):
        bench.step()
    return (now(bench) - begun) / count, before


def shared(bench: Workbench, device: str) -> Iterator[Figure]:
    """Rows over one long prefix: with and without its being read once for all of them."""
    rows, prefix, count = (64, 8192, 40) if device != "cpu" else (3, 40, 3)
    vocab, prefix_sharing = bench.runner.config.vocab_size, bench.runner.prefix_sharing
    [text] = prompts([prefix], vocab, 9)
    texts = [text + own for own in prompts([32] * rows, vocab, 3)]
    seconds = {}
    for kind, used in (("once", prefix_sharing), ("by each row", None)):
        bench.runner.prefix_sharing = used
        spared = bench.runner.num_saved_reads
        seconds[kind], _ = step_seconds(bench, texts, count)
        name, spared = f"{rows} rows over a prefix of {prefix}, read {kind}", bench.runner.num_saved_reads - spared
        bench.flush()
        yield figure(name, rows / seconds[kind], "tok/s", step_ms=seconds[kind] * 1e3, spared=spared)
    bench.runner.prefix_sharing = prefix_sharing
    yield figure("a shared prefix read once over read by each row", seconds["by each row"] / seconds["once"], "x")


def replay_seconds(bench: Workbench, rows: int) -> float | None:
    """Seconds of the decode graph and its sampler with nothing between; None without graphs."""
    if bench.steps is None or bench.steps.graphs is None:
        return None
    from plait.runtime.executor.gpu.cuda_graphs import GraphKey

    bench.engine_loop.commit_pending_step()  # else its sampler would draw over tokens that the next forward is to read
    graphs = bench.steps.graphs
    graph = graphs.graphs[
        GraphKey(next(size for size in graphs.capture_sizes[1] if size >= rows), 1)
    ]  # prompts share nothing
    begun = now(bench)
    for _ in range(20):
        graph.forward()
        graph.sample()
    return (now(bench) - begun) / 20


def prefill(bench: Workbench, device: str) -> Iterator[Figure]:
    _, rate = limits(bench)
    model, length = bench.runner.config, 4096 if device != "cpu" else 20
    layers = layer_weights(bench)
    for seed in range(3 if device != "cpu" else 1):  # the first compiles
        for prompt in prompts([length] * 4, model.vocab_size, seed):
            bench.call(prompt, 1)
        begun = now(bench)
        bench.finish()
        seconds = now(bench) - begun
        bench.flush()
    scores = 2 * 4 * length**2 * model.num_heads * model.head_dim * model.num_layers  # causal: half of 4 n^2 d
    flop = 2 * layers * 4 * length + scores
    yield figure(f"prompts, 4 of {length}: share of the matrix rate", flop / seconds / rate, "", 0.6)
    yield figure(f"prompts, 4 of {length}", 4 * length / seconds, "tok/s")


def constrained(bench: Workbench, device: str) -> Iterator[Figure]:
    rows, most, speed = 16 if device != "cpu" else 2, 96 if device != "cpu" else 20, {}
    texts = prompts([64] * rows, bench.runner.config.vocab_size, 5)
    for _ in range(2):  # the first time compiles
        for kind, spec in (("free", None), ("JSON", JsonSchema(SCHEMA))):
            bench.flush()
            numbers = [
                bench.call(text, most, spec, temperature=0.8, seed=i, ignore_eos=spec is None)
                for i, text in enumerate(texts)
            ]
            while bench.engine_loop.calls.num_compiling or bench.inbox.requests:
                bench.step()
            begun = now(bench)
            bench.finish()
            seconds = now(bench) - begun
            usages = [bench.inbox.ends[number].usage for number in numbers]
            forced = sum(usage.forced_tokens for usage in usages)
            speed[kind] = sum(usage.completion_tokens for usage in usages) / seconds
    yield figure(f"{rows} streams, free", speed["free"], "tok/s")
    yield figure(f"{rows} streams, JSON", speed["JSON"], "tok/s", forced=forced)
    sampled = speed["JSON"] - forced / seconds
    yield figure("JSON over free, forced tokens not counted", sampled / speed["free"], "x", 0.98)
    yield figure("JSON over free", speed["JSON"] / speed["free"], "x")
    bench.flush()


def offline(bench: Workbench, device: str) -> Iterator[Figure]:
    lengths = chat_lengths(1000) if device != "cpu" else [(9, 4), (30, 7), (4, 2)]
    texts = prompts([a for a, _ in lengths], bench.runner.config.vocab_size)
    for text in texts[:64]:
        bench.call(text[:32], 8)
    bench.flush()
    before = counts(bench)
    for text, (_, answer) in zip(texts, lengths, strict=True):
        bench.call(text, answer)
    begun = now(bench)
    bench.finish()
    seconds = now(bench) - begun
    answers, read = (sum(x[i] for x in lengths) for i in (1, 0))
    more = {name: value - before[name] for name, value in counts(bench).items()} | {"seconds": seconds}
    yield steady(f"{len(lengths)} chats", bench, before)
    yield figure(f"{len(lengths)} chats: output", answers / seconds, "tok/s", None, **more)
    yield from shares_of_ceilings(bench, lengths, answers / seconds)
    yield figure(f"{len(lengths)} chats: all tokens", (answers + read) / seconds, "tok/s")
    bench.flush()


CHAT_ROWS = (64, 256, 512, 1000)


def shares_of_ceilings(bench: Workbench, lengths: list[tuple[int, int]], speed: float) -> Iterator[Figure]:
    """The output speed over the most that the load allows at several numbers of rows; the goal is for the engine's."""
    bandwidth, rate = limits(bench)
    flop, own = 2.0 * layer_weights(bench), bench.engine_loop.batch_scheduler.max_batch_rows
    gpu = Machine(bandwidth, rate, weight_bytes(bench), bench.runner.page_bytes, flop)
    for rows in sorted({*CHAT_ROWS, own}):
        most = ceiling(lengths, rows, bench.runner.max_batch_tokens, gpu)
        name = f"{len(lengths)} chats: share of the ceiling of {rows} rows"
        yield figure(name, speed / most, "", 0.95 if rows == own else None, ceiling=most)


def layer_weights(bench: Workbench) -> int:
    """The number of weights in the layers' products; the output head multiplies only sampled tokens."""
    return sum(math.prod(shape) for name, shape in expected_shapes(bench.runner.config).items() if ".layers." in name)


def counts(bench: Workbench) -> dict[str, int]:
    """Counters of the engine. `captured` and `compiled` make a step wait; they do not grow in a steady state."""
    steps = bench.steps
    return {
        "steps": bench.engine_loop.num_steps,
        "replayed": steps.num_graph_replays if steps else 0,
        "ahead": steps.num_overlapped if steps else 0,
        "captured": steps.graphs.num_late_captures if steps and steps.graphs else 0,
        "compiled": COMPILATIONS.count,
    }


def steady(name: str, bench: Workbench, before: dict[str, int]) -> Figure:
    """How many graphs were captured and kernels compiled since `before`; none is the goal."""
    more = {key: value - before[key] for key, value in counts(bench).items()}
    found = more["captured"] + more["compiled"]
    return figure(f"{name}: captures and compilations", found, "times", 0.0, **more)


def narrow_weights(shape: str, device: str, kind: str, **settings: Any) -> Iterator[Figure]:
    """Decode and prompts with weights of 4 or 8 bits, on an engine of its own; the roofline has their bytes."""
    with closing(workbench(shape, device, max_batch_rows=64 if device != "cpu" else 4, **settings)) as bench:
        for part in (decode, prefill):
            for each in part(bench, device):
                yield each | {"name": f"{kind}: {each['name']}", "goal": None}


def chats(shape: str, device: str, kind: str, row_counts: tuple[int, ...]) -> Iterator[Figure]:
    """The chats at several numbers of rows, each on an engine of its own, beside the ceiling of that number."""
    for rows in row_counts if device != "cpu" else (2, 3):
        with closing(workbench(shape, device, max_batch_rows=rows, float8=kind == "fp8")) as bench:
            yield figure(f"{kind}, {rows} rows: weights read by a step", weight_bytes(bench) / 1e9, "GB")
            for each in offline(bench, device):
                if "ceiling of" not in each["name"] or each["goal"] is not None:
                    yield each | {"name": f"{kind}, {rows} rows: {each['name']}"}
        bench = None
        release_memory()


PARTS = {"decode": decode, "json": constrained, "shared": shared, "prefill": prefill, "offline": offline}
OWN_ENGINE_PARTS = {  # with engines of their own; 512 rows: the default of a pool as large as this model's
    "chats": partial(chats, kind="bf16", row_counts=(512,)),
    "chats-fp8": partial(chats, kind="fp8", row_counts=(512,)),
    "chats-more": partial(chats, kind="bf16", row_counts=(1000, 64)),
    "int4": partial(narrow_weights, kind="int4", weights="int4"),
    "fp8": partial(narrow_weights, kind="fp8", float8=True),
}


def figures(parts: list[str], shape: str, device: str) -> Iterator[Figure]:
    """Of the parts, one behind the other on one engine; {"done": part} where one came to its end."""
    bench = None
    for part in parts:
        has_failed = False
        try:
            if part in OWN_ENGINE_PARTS:
                if bench is not None:
                    bench.close()
                    bench = None
                    release_memory()
                yield from OWN_ENGINE_PARTS[part](shape, device)
            else:
                bench = bench or workbench(shape, device, max_batch_rows=256 if device != "cpu" else 4)
                yield from PARTS[part](bench, device)
            yield {"done": part}
        except Exception:
            traceback.print_exc()
            has_failed = True
        if has_failed:  # not in the `except` block, where the traceback still holds the KV cache
            bench = None
            release_memory()
    if bench is not None:
        bench.close()


def release_memory() -> None:
    """Frees the memory of engines that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *OWN_ENGINE_PARTS])
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, in a GPU's buffers")
    parser.add_argument("--limits", metavar="COPY,BF16,FP8", help="of the GPU, in B/s and FLOP/s (default: measured)")
    arguments = parser.parse_args()
    if arguments.dry:
        arguments.shape, arguments.device = "tiny", "cpu"
    left = set(arguments.parts)
    machine.limits()  # while the memory is free
    with torch.no_grad():
        for each in figures(arguments.parts, arguments.shape, arguments.device):
            print(json.dumps(each), flush=True)
            left.discard(each.get("done", ""))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
