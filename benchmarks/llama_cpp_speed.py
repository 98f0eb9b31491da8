"""Times llama.cpp on one model file; `cpu_models.py --llama PYTHON` runs it with that Python.

    PYTHON benchmarks/llama_cpp_speed.py MODEL.gguf THREADS

PYTHON has xllamacpp. Its build decides which instructions llama.cpp uses. Prints tokens a second of one stream, of a
prompt of 512 and of 16 streams, and the seconds to load.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PROMPT, STEPS, STREAMS = 512, 24, 16


def main() -> None:
    print(*measure(sys.argv[1], int(sys.argv[2])))


def measure(path: str, threads: int) -> tuple[float, ...]:
    """llama.cpp's own server in this process, and the times that it reports with its answers."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_batch = STREAMS * 384, STREAMS, PROMPT
    params.kv_unified = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    start = time.perf_counter()
    server = xllamacpp.Server(params)
    load = time.perf_counter() - start
    prompt = [timings(server, PROMPT, 1, seed)["prompt_per_second"] for seed in range(3)]
    one = [timings(server, 200, STEPS, seed)["predicted_per_second"] for seed in range(3)]
    return sorted(one)[1], sorted(prompt)[1], many_streams(server), load


def many_streams(server: object) -> float:
    """Tokens a second of all streams together, from answers so long that the prompts before them count little."""
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(lambda seed: timings(server, 8, 4 * STEPS, seed), range(STREAMS)))
    return sum(answer["predicted_per_second"] for answer in answers)


def timings(server: object, prompt: int, new: int, seed: int) -> dict[str, float]:
    request = {"prompt": text_of(prompt, seed), "n_predict": new, "temperature": 0} | dict(
        cache_prompt=False, ignore_eos=True
    )
    answer = server.handle_completions(request)  # type: ignore[attr-defined]
    return dict((json.loads(answer) if isinstance(answer, str) else answer)["timings"])


def text_of(length: int, seed: int) -> list[int]:
    return [100 + (i * (seed + 1)) % 900 for i in range(length)]


if __name__ == "__main__":
    main()
