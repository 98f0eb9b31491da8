"""The workloads of the comparison: decoding at several widths, prompts with and without a shared prefix, chats, a tree.

Each run draws its texts from its own seed, so only what the workload itself repeats can be cached.
`Done.uncached_prompt_tokens` counts the prompt tokens that a server with a perfect prefix cache still has to compute.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server_comparison.client import Answer, Chat, Messages

_WORDS = (
    "amber anchor apple arrow basket beacon bridge candle canyon castle cedar circle clock cloud coral corner cradle "
    "desert dragon ember engine falcon feather ferry forest fountain garden glacier hammer harbor hollow island ivory "
    "jacket jungle kettle ladder lantern marble meadow mirror mountain needle ocean orchard paper pebble pepper planet "
    "pocket quarry rabbit ribbon river saddle shadow signal silver spiral spring stable summer temple thunder tunnel "
    "valley velvet violin wagon walnut whisper willow window winter"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Size:
    """The sizes of the workloads. `SMALL` is for testing the benchmark itself."""

    out: int = 96  # tokens of a decoding stream
    short: int = 16
    turn: int = 32
    thought: int = 24
    prefix: int = 700  # words, which are slightly more tokens
    clients: int = 32
    prompts: int = 8
    chats: int = 8
    turns: int = 4
    branches: int = 3
    depth: int = 3


FULL = Size()
SMALL = Size(
    out=8, short=2, turn=4, thought=4, prefix=60, clients=4, prompts=2, chats=2, turns=2, branches=2, depth=2
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """One run of a workload. `wall`: seconds. `width`: how many answers ran at once."""

    wall: float
    answers: list[Answer]
    uncached_prompt_tokens: int
    width: int

    @property
    def out_tokens(self) -> int:
        return sum(answer.out_tokens for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def ttft(self) -> float:
        return statistics.median(answer.ttft for answer in self.answers)


# returns the answers, the uncached prompt tokens and the width
Work = Callable[[Chat, Size, random.Random], Awaitable[tuple[list[Answer], int, int]]]


def prose(words: int, draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def system(text: str) -> Messages:
    return [{"role": "system", "content": text}]


async def run(work: Work, chat: Chat, size: Size, seed: int) -> Done:
    """Runs a workload once. Raises ServerError as soon as one answer fails."""
    start = time.perf_counter()
    answers, uncached_prompt_tokens, width = await work(chat, size, random.Random(seed))
    return Done(time.perf_counter() - start, answers, uncached_prompt_tokens, min(width, chat.most))


def decode(streams: int) -> Work:
    async def work(chat: Chat, size: Size, draw: random.Random) -> tuple[list[Answer], int, int]:
        prompts = [
            user(f"Tell a long tale, the {i}th, about a {draw.choice(WORDS)} and a library.") for i in range(streams)
        ]
        answers = await asyncio.gather(*(chat.ask(prompt, size.out) for prompt in prompts))
        return answers, sum(answer.prompt_tokens for answer in answers), streams

    return work


async def long_prompts(chat: Chat, size: Size, draw: random.Random) -> tuple[list[Answer], int, int]:
    prompts = [user(prose(size.prefix + 30, draw)) for _ in range(size.prompts)]
    answers = await asyncio.gather(*(chat.ask(prompt, size.short) for prompt in prompts))
    return answers, sum(answer.prompt_tokens for answer in answers), size.prompts


async def shared_prefix(chat: Chat, size: Size, draw: random.Random) -> tuple[list[Answer], int, int]:
    """Questions behind one system prompt, 16 at a time."""
    prefix, slots = system(prose(size.prefix, draw)), asyncio.Semaphore(16)
    prompts = [prefix + user(prose(30, draw)) for _ in range(size.clients)]

    async def one(messages: Messages) -> Answer:
        async with slots:
            return await chat.ask(messages, size.short)

    answers = await asyncio.gather(*map(one, prompts))
    question_tokens = 40  # 30 words, most of them one token, and the chat template's tokens
    uncached_prompt_tokens = answers[0].prompt_tokens + question_tokens * (len(answers) - 1)
    return answers, uncached_prompt_tokens, min(16, size.clients)


async def chats(chat: Chat, size: Size, draw: random.Random) -> tuple[list[Answer], int, int]:
    """Several chats at once. Every turn repeats the whole conversation."""

    async def one(draw: random.Random) -> tuple[list[Answer], int]:
        messages, answers, uncached_prompt_tokens, cached = system(prose(200 * size.prefix // 700, draw)), [], 0, 0
        for _ in range(size.turns):
            messages = messages + user(prose(60, draw))
            answers.append(await chat.ask(messages, size.turn))
            uncached_prompt_tokens += max(0, answers[-1].prompt_tokens - cached)
            cached = answers[-1].prompt_tokens + answers[-1].out_tokens
            messages = [*messages, {"role": "assistant", "content": answers[-1].text}]
        return answers, uncached_prompt_tokens

    results = await asyncio.gather(*(one(random.Random(draw.random())) for _ in range(size.chats)))
    return (
        [answer for answers, _ in results for answer in answers],
        sum(uncached_prompt_tokens for _, uncached_prompt_tokens in results),
        size.chats,
    )


async def tree(chat: Chat, size: Size, draw: random.Random) -> tuple[list[Answer], int, int]:
    """Tree of thought: every node asks for the next step after its parent's conversation."""
    root, answers, uncached = user(prose(300 * size.prefix // 700, draw)), [], []

    async def node(parent: Messages, cached: int, depth: int, name: str) -> None:
        messages = parent + user(f"Propose step {name}.")
        answer = await chat.ask(messages, size.thought)
        answers.append(answer)
        uncached.append(max(0, answer.prompt_tokens - cached) if cached else 0)
        if depth < size.depth:
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            cached = answer.prompt_tokens + answer.out_tokens
            await asyncio.gather(*(node(messages, cached, depth + 1, f"{name}.{i}") for i in range(size.branches)))

    await asyncio.gather(*(node(root, 0, 1, str(i)) for i in range(size.branches)))
    first_level = answers[0].prompt_tokens + 12 * (size.branches - 1)  # the root once, a short turn per branch
    return answers, first_level + sum(uncached), size.branches**size.depth


WORKLOADS: dict[str, Work] = {
    **{f"decode_{streams}": decode(streams) for streams in (1, 4, 16, 64)},
    "long_prompts": long_prompts,
    "shared_prefix": shared_prefix,
    "chats": chats,
    "tree": tree,
}
