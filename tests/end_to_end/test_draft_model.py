"""`Runtime(draft=...)`: the embedded model guesses for itself, tokens do not change, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_eagle3_heads import DRAFT_VOCAB, save_head
from tiny_mtp_models import save_mimo
from trained_tokenizers import save_folder, train_tokenizer

import plait
from plait.constrained import JsonSchema
from plait.runtime.config import engine_config
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.errors import InputError, ModelNotFound
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process import draft_model as draft_model_module
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy.draft_model import DraftModel
from plait.runtime.scheduler.policy.head_draft import HeadDraft
from plait.runtime.weights.checkpoint import open_checkpoint

SCHEMA = JsonSchema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
ACCOUNT_PATH = draft_model_module._account_path  # a fixture replaces it
PROMPTS = ["The capital of France is", "def add(a, b):\n"]


@pytest.fixture(scope="module")
def drafting():
    """An engine whose draft model is the model itself, asked as if it cost a twentieth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftAccount, "guess_cost", lambda self, num_rows: 0.05)
        patch.setattr(draft_model_module, "_account_path", lambda *models: None)
        patch.setattr(DraftAccount, "record_step", lambda self, *counts: None)
        with plait.Engine(deterministic=True, drafts=(), draft=locate_model(), max_pages=600) as engine:
            yield engine


def outputs(engine, spec=None, **options):
    """The tokens of each prompt, and how many of them were drafted."""
    found, num_drafted = [], 0
    for prompt in PROMPTS:
        session = engine.client.open_session()
        session.append(prompt)
        for _ in range(2):
            result = session.generate(sampling_params(max_tokens=24, **options), spec).result()
            found.append(result.token_ids)
            num_drafted += result.usage.drafted_tokens
        session.close()
    return found, num_drafted


@pytest.mark.parametrize(
    ("spec", "options"),
    [(None, {"temperature": 0.0}), (None, {"temperature": 0.9, "seed": 3}), (SCHEMA, {"temperature": 0.0})],
)
def test_tokens_equal_those_without(exact, drafting, spec, options):
    drafted, num_drafted = outputs(drafting, spec, **options)
    assert drafted == outputs(exact, spec, **options)[0]
    num_tokens = sum(map(len, drafted))
    assert num_drafted > (0.3 if options["temperature"] or spec else 0.5) * num_tokens
    if not options["temperature"] and spec is None:  # the draft model is the model
        assert drafting.engine_loop.batch_scheduler.drafter.model.account.rate.rates()[0] > 0.9


def test_a_runtime_process_takes_a_draft_model(small_model):
    with plait.Runtime(draft=small_model, max_pages=600) as runtime:
        session = runtime.client.open_session()
        session.append(PROMPTS[0])
        assert len(session.generate(sampling_params(max_tokens=30, temperature=0.0)).result().token_ids) == 30


def test_what_was_measured_is_read_by_the_next_start(monkeypatch, small_model, tmp_path):
    path = tmp_path / "account"
    monkeypatch.setattr(draft_model_module, "_account_path", lambda *models: path)
    measured = []
    measure = DraftModel._measured
    monkeypatch.setattr(DraftModel, "_measured", lambda self: measured.append(self) or measure(self))

    def start():
        with plait.Engine(str(small_model), draft=small_model, max_pages=600) as engine:
            account = engine.engine_loop.batch_scheduler.drafter.model.account
            account.balance = account.balance - 1
            return account.balance

    assert start() == start() + 1 and len(measured) == 1
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert start() > 3 and len(measured) == 2


@pytest.fixture(scope="module")
def head(small_model, tmp_path_factory):
    """The folder of a random EAGLE-3 head for the small model."""
    config = open_checkpoint(small_model).config
    folder = tmp_path_factory.mktemp("head")
    save_head(folder, config, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, config.num_layers - 1]})
    return folder


def test_an_eagle3_head_guesses(monkeypatch, small_model, head):
    monkeypatch.setattr(draft_model_module, "_account_path", lambda *models: None)
    monkeypatch.setattr(DraftAccount, "guess_cost", lambda self, num_rows: 0.01)
    monkeypatch.setattr(DraftAccount, "record_step", lambda self, *counts: None)
    taken = []
    monkeypatch.setattr(HeadDraft, "_take", lambda self, text, logits: taken.append(logits))
    settings = {"max_pages": 600, "deterministic": True, "drafts": ()}
    with plait.Engine(str(small_model), **settings) as engine:
        expected = outputs(engine, temperature=0.0)[0]
    with plait.Engine(str(small_model), draft=head, **settings) as engine:
        assert outputs(engine, temperature=0.0)[0] == expected
    assert len(taken) > 5 and (taken[0] > -1e30).sum() == DRAFT_VOCAB


def test_a_runtime_process_takes_an_eagle3_head(small_model, head):
    with plait.Runtime(str(small_model), draft=str(head), max_pages=600) as runtime:
        session = runtime.client.open_session()
        session.append(PROMPTS[0])
        assert len(session.generate(sampling_params(max_tokens=30, temperature=0.0)).result().token_ids) == 30


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """The folder of a random MiMo, with a tokenizer."""
    folder = tmp_path_factory.mktemp("mimo")
    tokenizer = train_tokenizer("byte-level")
    save_mimo(folder, vocab=tokenizer.get_vocab_size())
    return save_folder(tokenizer, folder, eos_token="</s>")


def test_an_mtp_layer_guesses(monkeypatch, mimo):
    monkeypatch.setattr(draft_model_module, "_account_path", lambda *models: None)
    monkeypatch.setattr(DraftAccount, "guess_cost", lambda self, num_rows: 0.01)
    monkeypatch.setattr(DraftAccount, "record_step", lambda self, *counts: None)
    taken = []
    monkeypatch.setattr(HeadDraft, "_take", lambda self, text, logits: taken.append(logits.shape))
    settings = {"max_pages": 600, "deterministic": True, "drafts": ()}
    with plait.Engine(str(mimo), **settings) as engine:
        expected = outputs(engine, temperature=0.0)[0]
    with plait.Engine(str(mimo), draft="mtp", **settings) as engine:
        assert outputs(engine, temperature=0.0)[0] == expected
    assert len(taken) > 5


def test_a_runtime_process_takes_an_mtp_layer(monkeypatch, mimo, tmp_path):
    (tmp_path / "mtp").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name is not meant
    with plait.Runtime(str(mimo), draft="mtp", max_pages=600) as runtime:
        session = runtime.client.open_session()
        session.append(PROMPTS[0])
        assert len(session.generate(sampling_params(max_tokens=30, ignore_eos=True)).result().token_ids) == 30


def test_the_account_of_an_mtp_layer_is_not_that_of_the_model_as_its_own_draft(monkeypatch, mimo, tmp_path):
    monkeypatch.setattr(draft_model_module.object_code, "readable_folder", lambda: tmp_path)
    paths = {ACCOUNT_PATH(engine_config(draft=draft), mimo, mimo) for draft in ("mtp", str(mimo))}
    assert len(paths) == 2


def test_a_head_of_another_model_is_refused(small_model, head):
    with pytest.raises(InputError, match="target_hidden_size 64, not 576"):
        plait.Engine(draft=head, max_pages=600)


def test_another_vocabulary_is_refused(monkeypatch, small_model):
    load = draft_model_module.load_tokenizer

    def other(path, **options):
        tokenizer = load(path, **options)
        words = list(tokenizer.vocabulary.token_bytes)
        words[1000] = b"elsewhere"
        vocabulary = replace(tokenizer.vocabulary, token_bytes=tuple(words))
        return SimpleNamespace(vocab_size=tokenizer.vocab_size, vocabulary=vocabulary)

    monkeypatch.setattr(draft_model_module, "load_tokenizer", other)
    with pytest.raises(InputError, match=r"draft .*another vocabulary.*token 1000 is b'elsewhere', not"):
        plait.Engine(str(small_model), draft=small_model, max_pages=600)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"draft": "/nowhere/small.gguf"}, ModelNotFound, "/nowhere/small.gguf"),
        ({"draft": "mtp"}, InputError, r"draft: 'mtp' needs a model with one MTP layer; this one has 0"),
        ({"draft": "mtp", "weights": "bf16"}, InputError, "draft: torch or a GPU"),
        ({"draft": "MODEL", "weights": "bf16"}, InputError, "draft: torch or a GPU"),
        ({"draft": "MODEL", "dtype": "float32"}, InputError, "draft: torch or a GPU"),
        ({"draft": 3}, InputError, "draft"),
    ],
)
def test_what_cannot_have_a_draft_model_is_refused(small_model, settings, error, told):
    settings = {name: small_model if value == "MODEL" else value for name, value in settings.items()}
    with pytest.raises(error, match=told):
        plait.Engine(str(small_model), max_pages=600, **settings)


def test_ranks_have_no_draft_model(small_model):
    with pytest.raises(InputError, match="several ranks"):
        plait.Runtime(str(small_model), draft=small_model, tensor_parallel_size=2)
