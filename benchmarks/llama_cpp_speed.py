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
from typing import Any

PROMPT, STEPS, STREAMS = 512, 24, 16


def main(path: str, threads: str) -> None:
    """llama.cpp's own server in this process, and the times that it reports with its answers."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_batch = STREAMS * 384, STREAMS, PROMPT
    params.kv_unified = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    start = time.perf_counter()
    server = xllamacpp.Server(params)
    load = time.perf_counter() - start
    prompt = sorted(timings(server, PROMPT, 1, seed)["prompt_per_second"] for seed in range(3))[1]
    one = sorted(timings(server, 200, STEPS, seed)["predicted_per_second"] for seed in range(3))[1]
    with ThreadPoolExecutor(STREAMS) as pool:  # answers so long that the prompts before them count little
        answers = pool.map(lambda seed: timings(server, 8, 4 * STEPS, seed)["predicted_per_second"], range(STREAMS))
        print(one, prompt, sum(answers), load)


def timings(server: Any, length: int, new: int, seed: int) -> dict[str, float]:
    prompt = [100 + (i * (seed + 1)) % 900 for i in range(length)]
    request = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    answer = server.handle_completions(request)
    return dict((json.loads(answer) if isinstance(answer, str) else answer)["timings"])


if __name__ == "__main__":
    main(*sys.argv[1:])
