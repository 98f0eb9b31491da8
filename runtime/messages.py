"""The messages between a client and the scheduler: typed structs, encoded as MessagePack by msgspec.

Client to scheduler: Hello Open Append Generate Select Embed Fork Close Abort Inspect FlushCache WatchBlocks
LoadAdapter UnloadAdapter.
Scheduler to client: Welcome Tokens Finished Failed Status BlockBatch BlockSnapshot.

They are sent in frames, see `transport/frames.py`. The client numbers its sessions and calls. These ids are scoped to
its connection, so no client can name a session of another one. Every call (Generate, Select, Embed, Inspect,
FlushCache, LoadAdapter, UnloadAdapter) is answered by exactly one Finished, Failed or Status.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.constrained.specs import Spec
from plait.runtime.call_reports import CacheMiss, ChoiceScores, ExactInfo, ParticlesInfo, TokenLogprob, Usage
from plait.runtime.sampling_params import SamplingParams

PROTOCOL = 14  # incremented when the layout of any message changes
MAX_APPEND_TOKENS = 1 << 14  # per Append; longer texts take several
MAX_CHOICES = 1024
MAX_REPLACED = 8  # last tokens of a text that a Select, or a Generate with token healing, may replace
MAX_FORK_CHILDREN = 4096
MAX_TRAILING_TEXT_BYTES = 256  # of `Generate.trailing_text`
MAX_NAME_CHARS = 256  # of a tenant or cache salt
MAX_PRIORITY = 1_000_000

SelectMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "exact"
]
FinishReason = Literal["stop", "length"]
PoolingKind = Literal["last", "mean"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class. On the wire a message is an array that begins with its class name."""


class Hello(Message, frozen=True):
    protocol: int


class Open(Message, frozen=True):
    """Opens an empty session. Only sessions with equal `tenant` and `cache_salt` share cached prefixes.

    background: its calls run behind those of all other sessions, of any tenant and priority.
    adapter: the name of one of `Welcome.adapters`, which computes its text; "" is the model alone.
    """

    session: int
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    program: int = 0  # sessions of one program are scheduled as one user; 0: a separate program
    background: bool = False
    adapter: str = ""


class Append(Message, frozen=True):
    """Appends tokens to the session's text. Nothing is computed until a call needs them."""

    session: int
    token_ids: Annotated[list[int], Meta(max_length=MAX_APPEND_TOKENS)]


class Generate(Message, frozen=True):
    """Samples tokens after the session's text and appends them to it.

    trailing_text: text that is appended to the session's text after the value, or without it if the call fails. A value
        under `constraint` ends only where this text can follow. It is not part of the value or of the reply, and does
        not count towards `max_tokens`.
    plain_bytes: number of bytes at the end of the text that token healing may remove: plain text of one author. The
        last tokens within them are removed if a longer token begins with their text; the output then begins with that
        text, which is not part of the value or of the reply, and does not count towards `max_tokens`.
    """

    session: int
    call: int
    sampling: SamplingParams
    constraint: Spec | None = None
    trailing_text: str = ""
    plain_bytes: Annotated[int, Meta(ge=0)] = 0


class Select(Message, frozen=True):
    """Scores each choice (token ids) after the session's text and appends the best one.

    With the method "exact", a choice is drawn by its probability instead: the product of the probabilities of its
    tokens, divided by the sum of these products over all choices. `seed` is for this draw (None: a random one).
    replaced: number of tokens at the end of the text that are removed first. Each choice then begins with their bytes,
        so that a token can span the border between text and choice (token healing).
    top_logprobs: number of most likely tokens to report at each position.
    """

    session: int
    call: int
    choices: Annotated[list[list[int]], Meta(max_length=MAX_CHOICES)]
    method: SelectMethod = "token_length_normalized"
    timeout_s: float | None = None
    top_logprobs: int = 0
    replaced: int = 0
    seed: int | None = None


class Embed(Message, frozen=True):
    """Embeds the session's text, which stays unchanged; the result is `Finished.embedding`.

    dimensions: number of leading values of the vector to return (0: all).
    normalize: whether to scale them to unit length (None: the setting of the model's files).
    """

    session: int
    call: int
    dimensions: int = 0
    normalize: bool | None = None
    timeout_s: float | None = None


class Fork(Message, frozen=True):
    """Opens the sessions `children`, which begin with this session's text after its earlier instructions.

    adapter: as in `Open`, of the children, which compute the text again if it is another one; None: this session's.
    """

    session: int
    children: Annotated[list[int], Meta(max_length=MAX_FORK_CHILDREN)]
    adapter: str | None = None


class Close(Message, frozen=True):
    """Ends the session after its earlier instructions. Its KV pages stay in the prefix cache.

    Its calls run to their end, unless an `Abort` follows.
    """

    session: int


class Abort(Message, frozen=True):
    """Aborts one call at once, or with `call=None` the whole session. The calls fail with kind `aborted`.

    A session that was closed can be aborted until its last call has ended.
    """

    session: int
    call: int | None = None


class Inspect(Message, frozen=True):
    """Requests a `Status`."""

    call: int


class FlushCache(Message, frozen=True):
    """Evicts every cached prefix of `tenant` (None: of all) that no running call uses. Answered by a `Status`."""

    call: int
    tenant: str | None = None


class WatchBlocks(Message, frozen=True):
    """Requests block events (`BlockBatch`) for the next 10 s, see `kv_cache/block_events.py`. Has no other reply.

    snapshot: whether a `BlockSnapshot` comes first, for a client that knows no blocks yet or has missed a batch.
    """

    snapshot: bool


class LoadAdapter(Message, frozen=True):
    """Adds an adapter, a folder of peft or a GGUF file. Answered by a `Welcome` and a `Status`, once it is read.

    replace: whether another adapter may have the name; sessions that have that one keep it.
    """

    call: int
    name: str
    path: str
    replace: bool = False


class UnloadAdapter(Message, frozen=True):
    """Takes an adapter's name; sessions that have the adapter keep it. Answered by a `Welcome` and a `Status`."""

    call: int
    name: str


SessionMessage = Open | Append | Generate | Select | Embed | Fork | Close | Abort
ClientMessage = Hello | SessionMessage | Inspect | FlushCache | WatchBlocks | LoadAdapter | UnloadAdapter
SessionCall = Generate | Select | Embed


def trailing_text_error(trailing_text: str, sampling: SamplingParams, constraint: Spec | None) -> str | None:
    """Returns why a Generate cannot have this `trailing_text`, or None if it can."""
    if not trailing_text:
        return None
    if sampling.samples_sequence:
        name = "exact" if sampling.exact else "particles"
        return f"trailing_text cannot be combined with {name}: the text after a value is not part of its distribution"
    if constraint is None or sampling.min_tokens:
        return "trailing_text needs a constraint, and cannot be combined with min_tokens"
    if len(trailing_text.encode(errors="replace")) > MAX_TRAILING_TEXT_BYTES:
        return f"trailing_text is longer than {MAX_TRAILING_TEXT_BYTES} bytes"
    return None


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """The embeddings of a model: vectors of `size` values, pooled from the hidden states after its last norm.

    pooling: "last" uses the state of the last token, "mean" the average.
    normalized: whether the model's files set unit length.
    prompt: the text that the model's files put before every input.
    """

    size: int
    pooling: PoolingKind
    normalized: bool
    prompt: str = ""


class Welcome(Message, frozen=True):
    """The model that the scheduler serves.

    embeddings: None if the model has none, for the reason `no_embeddings_reason`.
    can_generate: whether the model has an output head.
    chat_template: replaces that of the model's files; "" if it does not.
    max_batch_rows: number of calls that run at once.
    model_fingerprint: of the model's files, see `model_files/fingerprint.py`.
    adapters: the names of the adapters that sessions can have, and the id of each (`adapters.adapter_pool`).
    """

    protocol: int
    model_path: str
    vocab_size: int
    context_length: int
    server_pid: int
    embeddings: EmbeddingInfo | None = None
    no_embeddings_reason: str = ""
    can_generate: bool = True
    chat_template: str = ""
    max_batch_rows: int = 64
    model_fingerprint: str = ""
    adapters: dict[str, str] = {}


class Tokens(Message, frozen=True):
    """Tokens appended to the text, in order. Tokens that a stop string may still cut off are held back."""

    call: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class Finished(Message, frozen=True):
    """The call ended with a value.

    matched: the stop string or stop token that ended it.
    prompt_logprobs: one entry per token from `SamplingParams.prompt_logprobs_from` on, if requested, in parts for
        `decode_logprobs`.
    embedding: the vector of an Embed, float32, little-endian.
    warnings: what the constraint does not enforce; see `Grammar.warnings`.
    exact: set if the value was drawn with `SamplingParams.exact`.
    particles: set if the value was drawn with `SamplingParams.particles`.
    cache_miss: of a Generate or an Embed.
    """

    call: int
    reason: FinishReason
    usage: Usage
    matched: str | int | None = None
    choice: ChoiceScores | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    embedding: bytes | None = None
    warnings: tuple[str, ...] = ()
    exact: ExactInfo | None = None
    particles: ParticlesInfo | None = None
    cache_miss: CacheMiss | None = None


class Failed(Message, frozen=True):
    """The call ended without a value. `kind`: that of a CallFailed subclass in `errors`, or VALUE_DOES_NOT_FIT.

    where: the place in a constraint that was refused, a JSON pointer; None if it has none.
    """

    call: int
    kind: str
    text: str
    where: str | None = None


class Status(Message, frozen=True):
    """The state of the scheduler. free_pages + cached_pages + used_pages == total_pages; a page holds one token's KV.

    The fields from `steps` on are counters; `UsageTotals` describes those from `prompt_tokens` to `forced_tokens`.
    shared_kv_tokens: tokens whose KV attention did not read again, because requests that share it read it together.
    """

    call: int
    sessions: int
    clients: int
    running_calls: int
    waiting_calls: int
    free_pages: int
    cached_pages: int
    used_pages: int
    total_pages: int
    steps: int
    computed_tokens: int
    retractions: int
    bad_frames: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    shared_kv_tokens: int = 0


class BlockBatch(Message, frozen=True):
    """The hashes of the blocks that entered and left the radix tree since the previous batch.

    An empty batch is a heartbeat, whose number shows whether an earlier batch was lost.

    epoch: when the tree was created, in nanoseconds; higher after a restart. sequence: 1, 2, … within an epoch.
    """

    epoch: int
    sequence: int
    added: list[int]
    removed: list[int]


class BlockSnapshot(Message, frozen=True):
    """All blocks in the tree; takes the place of the batch with this sequence number."""

    epoch: int
    sequence: int
    blocks: list[int]


ServerMessage = Welcome | Tokens | Finished | Failed | Status | BlockBatch | BlockSnapshot
