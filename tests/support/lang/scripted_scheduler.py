"""A scheduler that answers from a script, behind the real Client, Session, Call, tokenizer and chat template.

Tokens are bytes (0..255) and three control tokens. Instructions of a session run in order; an answer can be held
back until the test lets it go. Every request is kept, so that tests see what crossed the wire.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from plait.constrained.specs import Choices, Regex
from plait.runtime.call_reports import ChoiceScores, TokenLogprob, Usage
from plait.runtime.client.client import Client
from plait.runtime.errors import CallFailed, RuntimeGone
from plait.runtime.messages import (
    PROTOCOL,
    Abort,
    Append,
    Close,
    Failed,
    Finished,
    FlushCache,
    Fork,
    Generate,
    Inspect,
    Open,
    Select,
    Status,
    Tokens,
    Welcome,
)
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import AddedToken, Backends, TokenizerDefinition, unicode_to_byte
from plait.runtime.tokenizer.tokenizer import Tokenizer

CONTROL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECE = 4  # bytes in one Tokens message


def byte_tokenizer(template: str | None = CHATML, control: dict[str, int] = CONTROL) -> Tokenizer:
    """A tokenizer of bytes and the tokens of `control`, which are numbered from 256."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=unicode_to_byte(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(
        TokenizerDefinition(
            backends=Backends.of(backend, backend),
            prefix_after_control=False,
            added_tokens={text: AddedToken(token) for text, token in control.items()},
            control_ids=frozenset(control.values()),
            token_bytes=(*(bytes([byte]) for byte in range(256)), *(b"" for _ in control)),
            eos_ids=(258,),
            bos_id=None,
            add_bos=False,
            chat_template=None if template is None else ChatTemplate(template, "", "<|im_end|>"),
        )
    )


class Gate:
    """An answer that comes only after `open()`; `pieces` of it may come before."""

    def __init__(self, answer: str | CallFailed, early: str = "") -> None:
        self.answer, self.early = answer, early
        self._go: Callable[[], None] | None = None
        self._opened = False
        self._lock = threading.Lock()
        self.reached = threading.Event()

    def wait(self, go: Callable[[], None]) -> None:
        with self._lock:
            self._go = go
            opened = self._opened
        self.reached.set()
        if opened:
            go()

    def open(self) -> None:
        with self._lock:
            self._opened, go = True, self._go
        if go is not None:
            go()


Outcome = str | list[int] | CallFailed | Gate


@dataclass
class _Session:
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    waiting: deque[Any] = field(default_factory=deque)
    running: Any = None
    aborted: bool = False
    failed: CallFailed | None = None  # then nothing after it can be computed, as in the real scheduler


def default_answer(prompt: str, request: Generate) -> Outcome:
    match request.constraint:
        case Choices(choices):
            return choices[0]
        case Regex():
            return "42"
    return " fine."


class ScriptedScheduler:
    """A Channel. `answer(prompt, Generate)` and `pick(prompt, choices)` are the script; tests replace them."""

    def __init__(self) -> None:
        self.welcome = Welcome(PROTOCOL, "scripted", 259, 1 << 20, 1)
        self.answer: Callable[[str, Generate], Outcome] = default_answer
        self.pick: Callable[[str, list[str]], int | CallFailed] = lambda prompt, choices: 0
        self.requests: list[Any] = []
        self.sessions: dict[int, _Session] = {}
        self.keep_requests = True
        self._lock = threading.RLock()
        self._dead: str | None = None
        self._on_reply: Callable[[Any], None] = lambda reply: None
        self._on_disconnect: Callable[[str], None] = lambda why: None

    # -- Channel ----------------------------------------------------------------------------------

    def start(self, on_reply: Callable[[Any], None], on_disconnect: Callable[[str], None]) -> None:
        self._on_reply, self._on_disconnect = on_reply, on_disconnect

    def send(self, request: Any) -> None:
        with self._lock:
            if self._dead is not None:
                raise RuntimeGone(self._dead)
            if self.keep_requests:
                self.requests.append(request)
            self._take(request)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return condition.wait_for(ready, timeout_s)

    def pump(self) -> None:
        pass

    def close(self) -> None:
        self.die("closed")

    def die(self, why: str) -> None:
        self._dead = why
        self._on_disconnect(why)

    # -- what tests ask ---------------------------------------------------------------------------

    def sent(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    def open_sessions(self) -> int:
        return len(self.sessions)

    # -- instructions -----------------------------------------------------------------------------

    def _take(self, request: Any) -> None:
        match request:
            case Open(session):
                self.sessions[session] = _Session()
            case Inspect(call) | FlushCache(call):
                counts = dict.fromkeys(Status.__struct_fields__, 0) | {"call": call, "sessions": len(self.sessions)}
                self._on_reply(Status(**counts))
            case Abort(session, call):
                self._abort(session, call)
            case Append(session) | Generate(session) | Select(session) | Fork(session) | Close(session):
                self.sessions[session].waiting.append(request)
                if isinstance(request, Fork):
                    for child in request.children:
                        self.sessions[child] = _Session(running=request)
                self._advance(session)

    def _advance(self, number: int) -> None:
        session = self.sessions.get(number)
        while session is not None and session.running is None and session.waiting:
            request = session.waiting.popleft()
            match request:
                case Append(_, token_ids):
                    session.token_ids += token_ids
                case Fork(_, children):
                    self._fork(session, children)
                case Close():
                    del self.sessions[number]
                    return
                case Generate() | Select() if session.failed is not None:
                    text = f"the session cannot continue after a failed call: {session.failed}"
                    self._on_reply(Failed(request.call, session.failed.kind, text))
                case Generate():
                    session.running = request
                    self._generate(number, session, request)
                case Select():
                    self._select(session, request)

    def _fork(self, session: _Session, children: list[int]) -> None:
        for number in children:
            child = self.sessions.get(number)
            if child is not None:
                child.token_ids, child.num_computed = list(session.token_ids), session.num_computed
                child.running = None
                child.failed = session.failed
                self._advance(number)

    def _generate(self, number: int, session: _Session, request: Generate) -> None:
        outcome = self.answer(self.text(session.token_ids), request)
        if not isinstance(outcome, Gate):
            self._finish(number, session, request, outcome, 0)
            return
        gate, early = outcome, outcome.early
        self._tokens(session, request, early.encode())

        def go() -> None:
            with self._lock:
                if session.running is request:
                    self._finish(number, session, request, gate.answer, len(early.encode()))

        gate.wait(go)

    def _finish(self, number: int, session: _Session, request: Generate, outcome: Any, num_sent: int) -> None:
        session.running = None
        if isinstance(outcome, CallFailed):
            session.failed = outcome
            self._on_reply(Failed(request.call, outcome.kind, str(outcome)))
        else:
            data = list(outcome.encode()) if isinstance(outcome, str) else outcome
            fits = data[: request.sampling.max_tokens]
            usage = self._usage(session, num_sent, len(fits))
            self._tokens(session, request, fits[num_sent:])
            self._on_reply(Finished(request.call, "stop" if fits == data else "length", usage))
        self._advance(number)

    def _tokens(self, session: _Session, request: Generate, data: Sequence[int]) -> None:
        for at in range(0, len(data), PIECE):
            ids = list(data[at : at + PIECE])
            session.token_ids += ids
            logprobs = [self._logprob(token, request) for token in ids] if request.sampling.logprobs else None
            self._on_reply(Tokens(request.call, ids, logprobs))

    def _logprob(self, token: int, request: Generate) -> TokenLogprob:
        top = [((token + i) % 256, -0.5 - i) for i in range(request.sampling.top_logprobs)]
        return TokenLogprob(token, -0.5, top)

    def _select(self, session: _Session, request: Select) -> None:
        choices = [self.text(ids) for ids in request.choices]
        del session.token_ids[len(session.token_ids) - request.replaced :]
        index = self.pick(self.text(session.token_ids), choices)
        if isinstance(index, CallFailed):
            session.failed = index
            self._on_reply(Failed(request.call, index.kind, str(index)))
            return
        usage = self._usage(session, 0, 0)
        chosen = request.choices[index]
        session.token_ids += chosen
        logprobs = [[-1.0 if i == index else -2.0] * len(ids) for i, ids in enumerate(request.choices)]
        scores = [sum(each) / len(each) for each in logprobs]
        alone = [[-3.0] * len(ids) for ids in request.choices] if request.method.startswith("unc") else None
        self._on_reply(Tokens(request.call, chosen))
        self._on_reply(Finished(request.call, "stop", usage, choice=ChoiceScores(index, scores, logprobs, alone)))

    def _usage(self, session: _Session, num_sent: int, num_answered: int) -> Usage:
        num_prompt = len(session.token_ids) - num_sent
        cached = min(session.num_computed, num_prompt)
        session.num_computed = num_prompt + num_answered
        return Usage(num_prompt, cached, num_prompt - cached, 0, num_answered)

    def _abort(self, number: int, call: int | None) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        ended = [r for r in (session.running, *session.waiting) if isinstance(r, (Generate, Select))]
        ended = [r for r in ended if call is None or r.call == call]
        for request in ended:
            if request is session.running:
                session.running = None
            else:
                session.waiting.remove(request)
            self._on_reply(Failed(request.call, "aborted", "the call was aborted"))
        if call is None:
            del self.sessions[number]
        else:
            self._advance(number)

    @staticmethod
    def text(token_ids: list[int]) -> str:
        """Tokens as text; a control token, and only that, is written with double angle brackets."""
        names = {token: f"<{text}>" for text, token in CONTROL.items()}
        data = b"".join(bytes([t]) if t < 256 else names.get(t, "").encode() for t in token_ids)
        return data.decode(errors="replace")


class ScriptedBackend:
    """What tests use as `backend=`: like a Runtime it has a `.client`."""

    def __init__(self, template: str | None = CHATML) -> None:
        self.scheduler = ScriptedScheduler()
        self.client = Client(self.scheduler, byte_tokenizer(template))
        self.is_shut_down = False

    def script(self, *rules: tuple[str, Outcome], default: Outcome = " fine.") -> None:
        """Answers by how the prompt ends: the first rule whose text is at its end."""

        def answer(prompt: str, request: Generate) -> Outcome:
            return next((outcome for end, outcome in rules if prompt.endswith(end)), default)

        self.scheduler.answer = answer

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.client.close()
