"""The frames between a client and the scheduler: one struct per message, encoded by msgspec, never pickled.

Client to scheduler: Hello Open Append Generate Select Embed Fork Close Abort Inspect FlushCache.
Scheduler to client: Welcome Tokens Finished Failed Status.

A request is a frame. Replies travel as lists: a frame holds all that one step has for a client.

Ids are integers that the client counts up; the scheduler owns them per connection, so that no client can name
another's. Every call (Generate, Select, Embed, Inspect, FlushCache) gets exactly one Finished, Failed or Status.

Knows: the shape of a message. Must not know: sockets, tensors, text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.constrained.specs import Spec
from plait.runtime.sampling import SamplingParams

PROTOCOL = 4  # counts up whenever a frame changes its shape
MAX_FRAME_BYTES = 64 << 20
MAX_CHOICES = 1024
MAX_FORK = 4096
MAX_NAME = 256  # characters of a tenant or cache salt
MAX_PRIORITY = 1_000_000

SelectMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
FinishReason = Literal["stop", "length"]
PoolingKind = Literal["last", "mean"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every frame."""


class Hello(Message, frozen=True):
    protocol: int


class Open(Message, frozen=True):
    """Starts an empty session. `tenant` and `cache_salt` choose the prefix cache it may share."""

    session: int
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    program: int = 0  # sessions of one program share one fairness account; 0: a program of its own


class Append(Message, frozen=True):
    """Adds tokens to the session's text. Costs nothing until a Generate or Select needs them."""

    session: int
    token_ids: list[int]


class Generate(Message, frozen=True):
    """Samples tokens after the session's text; what is sampled becomes part of the text."""

    session: int
    call: int
    sampling: SamplingParams
    constraint: Spec | None = None


class Select(Message, frozen=True):
    """Scores each choice (token ids) after the session's text and appends the best one."""

    session: int
    call: int
    choices: list[list[int]]
    method: SelectMethod = "token_length_normalized"
    timeout_s: float | None = None
    top_logprobs: int = 0  # how many of the likeliest tokens to tell at each position


class Embed(Message, frozen=True):
    """Makes one vector of the session's text, which stays as it is; the answer is `Finished.embedding`.

    `dimensions`: only so many of its first numbers are wanted (0: all). `normalize`: whether it is then scaled to the
    length 1 (None: where the model's files say so).
    """

    session: int
    call: int
    dimensions: int = 0
    normalize: bool | None = None
    timeout_s: float | None = None


class Fork(Message, frozen=True):
    """Opens sessions `children` that begin with this session's text as it is when the instruction is reached."""

    session: int
    children: list[int]


class Close(Message, frozen=True):
    """Ends the session after its earlier instructions; its pages become ordinary cache."""

    session: int


class Abort(Message, frozen=True):
    """Ends one call, or with `call=None` the whole session, at once. Its calls fail with kind `aborted`."""

    session: int
    call: int | None = None


class Inspect(Message, frozen=True):
    """Asks for a `Status`."""

    call: int


class FlushCache(Message, frozen=True):
    """Drops every cached prefix that no running call needs; answered by a `Status`."""

    call: int


Request = Hello | Open | Append | Generate | Select | Embed | Fork | Close | Abort | Inspect | FlushCache
SessionCall = Generate | Select | Embed


class Embeddings(msgspec.Struct, frozen=True, array_like=True):
    """What a model makes of a text: `size` numbers, pooled from the states behind its last norm: that of the last
    token, or the mean of all. `normalized`: its files want the vector's length to be 1."""

    size: int
    pooling: PoolingKind
    normalized: bool


class Welcome(Message, frozen=True):
    """What a client must know of the model: where its tokenizer is and what fits.

    `embeddings`: None where it makes none, for the reason in `no_embeddings`. `generates`: it has an output head.
    """

    protocol: int
    model_path: str
    vocab_size: int
    context_length: int
    server_pid: int
    embeddings: Embeddings | None = None
    no_embeddings: str = ""
    generates: bool = True


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What one call cost. prompt_tokens == cached_tokens + computed_tokens, whatever happened on the way.

    `cached_tokens`: prompt tokens whose KV was found (in the radix tree, or kept by the session itself).
    `computed_tokens`: prompt tokens that went through the model. `recomputed_tokens`: tokens computed a second
    time because the pool was full. `completion_tokens` are sampled or forced; `forced_tokens` of them were not
    sampled, and `drafted_tokens` were guessed from the text before the model confirmed them. Times in seconds:
    waiting to be admitted, until the first token, and in all; `compile_s`, a part of `queue_s`, was spent waiting for
    the call's own grammar.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    wall_s: float = 0.0
    drafted_tokens: int = 0
    compile_s: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token, its logprob, and the most likely tokens at that position with theirs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class ChoiceScores(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a Select. `token_logprobs[i][j]`: logprob of token j of choice i; scores decide.

    `top_logprobs[i][j]`: the likeliest tokens where token j of choice i stands, where that was asked for.
    """

    index: int
    scores: list[float]
    token_logprobs: list[list[float]]
    unconditional_logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None


class Tokens(Message, frozen=True):
    """Tokens that now belong to the text, in order. Tokens a stop string may still cut off are held back."""

    call: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class Finished(Message, frozen=True):
    """The call ended with a value. `matched` is the stop string or stop token that ended it.

    `prompt_logprobs`: one for each token from `SamplingParams.prompt_logprobs_from` on, where that was asked for.
    `embedding`: an Embed's numbers, float32, little-endian.
    """

    call: int
    reason: FinishReason
    usage: Usage
    matched: str | int | None = None
    choice: ChoiceScores | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: bytes | None = None


class Failed(Message, frozen=True):
    """The call ended without a value; `kind` names a class in runtime/errors.py."""

    call: int
    kind: str
    text: str


class Status(Message, frozen=True):
    """A look at the scheduler. Page counts: free + cached + held == total (one page holds one token's KV).

    From `steps` on the counts only grow: see `scheduler.totals` for the four from `prompt_tokens` on. `spared_tokens`:
    tokens of cached KV that attention did not read again, because rows that share them read them once.
    """

    call: int
    sessions: int
    clients: int
    running_calls: int
    waiting_calls: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int
    steps: int
    computed_tokens: int
    retractions: int
    bad_frames: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    spared_tokens: int = 0


Reply = Welcome | Tokens | Finished | Failed | Status

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_replies = msgspec.msgpack.Decoder(list[Reply]).decode


def frame_of(replies: list[bytes]) -> bytes:
    """The frame of replies that are encoded already: a list in MessagePack is a header, then one after the other.

    >>> decode_replies(frame_of([encode(Tokens(1, [2])), encode(Tokens(3, [4]))]))[1].call
    3
    """
    return b"\xdd" + len(replies).to_bytes(4, "big") + b"".join(replies)
