"""What activations in float8 cost in quality: perplexity with fp8 weights, widened and by fp8 x fp8 products.

    python benchmarks/float8_quality.py [--model PATH] [--tokens 4096] [--only block]

The layers' matrices are rounded to e4m3 with a scale per tensor, per output, and per block of 128 x 128, as published
checkpoints are. Both products are the reference's, in float32 on the CPU, so that the difference is that of rounding
the activations alone. The text is that of `cpu_kernels.py --perplexity`, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pydoc_data.topics import topics

import torch
from cpu_kernels import WINDOW, logprobs, targets

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.quantized_weights import Float8Weight
from plait.kernels.reference.float8_matmul import LARGEST, float8_matmul
from plait.kernels.reference.matmul import int8_matmul
from plait.runtime.config import engine_config
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer

Product = Callable[[torch.Tensor, Float8Weight, torch.Tensor | None], torch.Tensor]
GRAINS = {"per tensor": (0, 0), "per output": (1, 0), "per block of 128 x 128": (128, 128)}  # outputs, inputs; 0: all
HEAD_OUTPUTS = 32000  # only output heads have as many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a GGUF or a folder; default: the embedded model")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text that are read")
    parser.add_argument("--only", default="", help="only scales whose name has this word: tensor, output or block")
    options = parser.parse_args()
    path, linear = locate_model(options.model), Float8Layers()
    config = engine_config(device="cpu", dtype="float32", weights="bf16", max_pages=WINDOW, max_batch_tokens=WINDOW)
    kernels = replace(select_kernels(torch.device("cpu"), torch.float32), linear=linear)
    text = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 4000)
    tokens = load_tokenizer(path).encode_plain(text[: 8 * options.tokens])[: options.tokens]
    with torch.no_grad():
        runner = TorchRunner(config, path, kernels=kernels)
        exact = predictions(runner, tokens)
        show("float32", exact, exact, tokens)
        for grain in (name for name in GRAINS if options.only in name):
            for name, product in (("widened", int8_matmul), ("fp8 x fp8", float8_matmul)):
                linear.use(product, grain)
                show(f"fp8 {grain}, {name}", predictions(runner, tokens), exact, tokens)


class Float8Layers:
    """A linear layer that rounds its weight to float8, unless it is the output head, and multiplies by a product."""

    def __init__(self) -> None:
        self.product: Product | None = None
        self.grain = ""
        self.held: dict[int, Float8Weight] = {}  # by the address of the weight

    def use(self, product: Product, grain: str) -> None:
        """Chooses the product and what shares a scale, one of GRAINS."""
        if grain != self.grain:
            self.held.clear()
        self.product, self.grain = product, grain

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        is_head = len(weight) > HEAD_OUTPUTS
        if self.product is None or is_head:
            return torch.nn.functional.linear(x, weight, bias)
        if weight.data_ptr() not in self.held:
            self.held[weight.data_ptr()] = quantize(weight, *GRAINS[self.grain])
        return self.product(x, self.held[weight.data_ptr()], bias)


def quantize(weight: torch.Tensor, outputs: int, inputs: int) -> Float8Weight:
    """Rounds a weight [N, K] to e4m3; blocks of `outputs` x `inputs` share a scale (0: all)."""
    (n, k), (rows, columns) = weight.shape, (outputs or len(weight), inputs or weight.shape[1])
    largest = torch.stack([part.abs().amax(0) for part in weight.float().split(rows)])  # [N / rows, K]
    largest = torch.stack([part.amax(1) for part in largest.split(columns, dim=1)])  # [K / columns, N / rows]
    scales = (largest.clamp(min=1e-12) / LARGEST).repeat_interleave(rows, dim=1)[:, :n]
    values = weight.float() / scales.T.repeat_interleave(columns, dim=1)[:, :k]
    codes = values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Weight(codes, scales.contiguous() if inputs else scales[0].contiguous(), inputs or 32)


def predictions(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    """The log probabilities of the tokens after each token."""
    return torch.cat([logprobs(runner, tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)])


def show(name: str, found: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> None:
    """Prints the perplexity, and the distance from float32."""
    chosen = found.gather(1, targets(tokens))
    divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
    agree = (exact.argmax(-1) == found.argmax(-1)).float().mean().item()
    print(
        f"{name:40} perplexity {math.exp(-chosen.mean().item()):7.4f}, from float32: divergence {divergence:.5f} nats, "
        f"the same first choice {agree:.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
