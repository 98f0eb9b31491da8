"""The lengths of 1,000 chats as vLLM's and SGLang's benchmarks sample them from ShareGPT.

Both keep (prompt, answer) pairs of at least 4 tokens each, prompts of at most 1,024 and sums of at most 2,048 tokens,
and publish totals with Llama 3.1's tokenizer: 369,103 prompt and 326,408 answer tokens of 1,648 requests
(https://github.com/sgl-project/sglang/issues/2805), 229,711 and 203,068 of 1,000 with the chat template
(https://github.com/vllm-project/vllm/pull/18566): means of 224 and 198 tokens. The distribution itself is not published
with them. Here it is log-normal, with the same limits and means; the skew is our choice.
"""

from __future__ import annotations

import numpy as np

PUBLISHED_MEANS = (224.0, 198.1)  # tokens of a prompt, of an answer
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
LOG_MEANS, LOG_DEVIATIONS = (5.2, 4.8), (1.5, 1.05)
# percentile: tokens of (prompt, answer) among 1,000
PERCENTILES = {10: (24, 32), 25: (54, 60), 50: (135, 118), 75: (314, 235), 90: (597, 471), 99: (916, 1178)}


def chat_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Returns (prompt, answer) tokens of `count` chats."""
    generator, found = np.random.default_rng(seed), []
    while len(found) < count:
        prompt, answer = (int(x) for x in generator.lognormal(LOG_MEANS, LOG_DEVIATIONS))
        if MIN_TOKENS <= prompt <= MAX_PROMPT and MIN_TOKENS <= answer <= MAX_TOTAL - prompt:
            found.append((prompt, answer))
    return found
