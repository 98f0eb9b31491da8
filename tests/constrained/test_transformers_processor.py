"""`GrammarLogitsProcessor` in transformers' own `generate`: greedy, sampled, with beams, one call after another."""

from __future__ import annotations

import re

import pytest
import torch
from matchers import allowed_tokens, compile_in_process
from transformers import LlamaConfig, LlamaForCausalLM

from plait.constrained import GrammarLogitsProcessor, Regex, Vocabulary

EOS = 0
BYTES = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(1, 256)), b"ab", b"ba"), (EOS,), lambda text: [*text.encode()]
)
PATTERN = Regex("(?:ab|ba|c){3,6}")
PROMPTS = torch.tensor([[120, 121, 122], [97, 98, 120]])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(BYTES) + 7, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def grammar():
    return compile_in_process(PATTERN, BYTES)


def generated(model, processor, **options):
    ids = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), logits_processor=[processor], **options)
    return [b"".join(BYTES.token_bytes[token] for token in row).decode() for row in ids[:, PROMPTS.shape[1] :].tolist()]


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_beams": 3}],
    ids=["greedy", "sampled", "beams", "sampled beams"],
)
def test_every_answer_matches_and_the_next_call_begins_anew(model, grammar, options):
    processor = GrammarLogitsProcessor(grammar, BYTES)
    for _ in range(2):
        texts = generated(model, processor, max_new_tokens=20, **options)
        assert len(texts) == 2 * options.get("num_return_sequences", 1)
        assert all(re.fullmatch(PATTERN.pattern, text) for text in texts), texts


def test_a_step_forbids_what_the_grammar_does_not_allow_and_changes_nothing_else(model, grammar):
    processor, scores = GrammarLogitsProcessor(grammar, BYTES), torch.randn(2, len(BYTES) + 7)
    matcher = grammar.matcher()
    text = torch.empty(2, 0, dtype=torch.long)
    for token in (97, 98, 257, 99):
        masked = processor(text, scores)
        allowed = allowed_tokens(matcher, BYTES)
        assert masked[0].isfinite().nonzero().flatten().tolist() == allowed
        assert torch.equal(masked[:, allowed], scores[:, allowed])
        text = torch.cat([text, torch.tensor([[token], [token]])], 1)
        assert matcher.accept(token)


def test_a_prompt_one_token_longer_than_the_last_text_is_a_new_prompt(grammar):
    processor, scores = GrammarLogitsProcessor(grammar, BYTES), torch.zeros(2, len(BYTES))
    start = processor(PROMPTS, scores)
    assert torch.equal(processor(PROMPTS.flip(1).repeat(1, 2)[:, :4], scores), start)


def test_wrong_use_is_refused(grammar):
    with pytest.raises(ValueError, match=f"250 logits, the grammar's vocabulary {len(BYTES)}"):
        GrammarLogitsProcessor(grammar, BYTES)(PROMPTS, torch.zeros(2, 250))
    processor = GrammarLogitsProcessor(grammar, BYTES)
    processor(PROMPTS, torch.zeros(2, len(BYTES)))
    with pytest.raises(ValueError, match="token 120 behind the prompt does not match"):
        processor(torch.cat([PROMPTS, torch.tensor([[97], [120]])], 1), torch.zeros(2, len(BYTES)))
