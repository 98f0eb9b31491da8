"""The perplexity of each weight format on a CPU, beside float32 of the same file.

    python benchmarks/perplexity.py [--model PATH] [--tokens 4096]

The text is Python's reference (`pydoc_data.topics`), in windows of 512 tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from common.options import parsed
from common.steps import step_batch

from plait.runtime.config import engine_config
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer

WINDOW = 512
FORMATS = [
    ("float32", dict(dtype="float32")),
    ("bf16", dict(dtype="bfloat16", weights="bf16")),
    ("as-stored", dict(dtype="bfloat16", weights="as-stored")),
    ("int8 KV", dict(dtype="bfloat16", weights="as-stored", kv_dtype="int8")),
    ("int8", dict(dtype="bfloat16", weights="int8")),
    ("int4", dict(dtype="bfloat16", weights="int4")),
]


def main() -> None:
    options = parsed(__doc__, model=None, tokens=4096)
    perplexities(locate_model(options.model), options.tokens)


def perplexities(path: Path, count: int) -> None:
    """Prints each format's perplexity, and its divergence from float32."""
    text = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 4000)
    exact: torch.Tensor | None = None
    for name, settings in FORMATS:
        runner, _, _ = make_runner(engine_config(max_pages=WINDOW, max_batch_tokens=WINDOW, **settings), path)
        tokens = load_tokenizer(path, vocab_size=runner.config.vocab_size).encode_plain(text[: 8 * count])[:count]
        predicted = torch.cat([logprobs(runner, tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)])
        chosen = predicted.gather(1, targets(tokens))
        exact = predicted if exact is None else exact
        divergence = (exact.exp() * (exact - predicted)).sum(-1).mean().item()
        agree = (exact.argmax(-1) == predicted.argmax(-1)).float().mean().item()
        print(
            f"{name:10} perplexity {math.exp(-chosen.mean().item()):7.4f}, from float32: "
            f"divergence {divergence:.5f} nats, the same first choice {agree:.2%}",
            flush=True,
        )


def targets(tokens: list[int]) -> torch.Tensor:
    """Returns [n, 1]: the token after each position, except the last of each window."""
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    return torch.tensor([token for window in windows for token in window[1:]])[:, None]


def logprobs(runner: LoadedRunner, tokens: list[int]) -> torch.Tensor:
    """Returns the log probabilities [len(tokens) - 1, V] of the token after each token of a text."""
    batch = step_batch([tokens], len(tokens), first_logits=0)
    return torch.as_tensor(runner.logits(runner.forward(batch), {}))[:-1].log_softmax(-1)


if __name__ == "__main__":
    main()
