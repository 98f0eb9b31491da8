"""The least time that a GPU needs for a load: each step reads at copy bandwidth and multiplies at the matrix rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What bounds a step of one model on one GPU."""

    bandwidth: float  # bytes per second
    rate: float  # FLOP per second
    weight_bytes: int  # read by every step
    kv_bytes: int  # of one token in all layers
    token_flop: float  # of the layers' products, per new token

    def step_seconds(self, new_tokens: int, held_tokens: int) -> float:
        """Seconds of a step that computes `new_tokens` and reads the KV of `held_tokens`."""
        memory = (self.weight_bytes + held_tokens * self.kv_bytes) / self.bandwidth
        return max(memory, new_tokens * self.token_flop / self.rate)


def ceiling(lengths: list[tuple[int, int]], rows: int, batch_tokens: int, machine: Machine) -> float:
    """Returns the most output tokens per second for (prompt, answer) lengths that all wait at the start.

    Up to `rows` calls run at once, in order of arrival, and a step has up to `batch_tokens` new tokens. The last step
    of a prompt samples its first token. No step waits for the host, and nothing beside weights, KV and products counts.
    """
    waiting = list(reversed(lengths))
    running: list[list[int]] = []  # [tokens held, prompt tokens left, answer tokens left]
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < rows:
            prompt, answer = waiting.pop()
            running.append([0, prompt, answer])
        budget, held = batch_tokens, 0
        for call in sorted(running, key=lambda call: call[1] > 0):  # decoding calls first
            count = min(budget, call[1]) if call[1] else min(budget, 1)
            if not count:
                continue
            budget -= count
            held += call[0]
            call[0] += count
            call[1] = max(0, call[1] - count)
            call[2] -= not call[1]
        seconds += machine.step_seconds(batch_tokens - budget, held)
        running = [call for call in running if call[2] > 0]
    return sum(answer for _, answer in lengths) / seconds
