"""A tiny random Qwen 3 saved as an embedding model: no output head, and the files of sentence-transformers."""

from __future__ import annotations

import json

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import Qwen3Config, Qwen3Model

END, TURN_END = "<|endoftext|>", "<|im_end|>"  # the end token of a text; eos_token of tokenizer_config.json
SIZE, LAYERS = 64, 2
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
TEXTS = ["a", "The capital of France is Paris.", "déjà vu 漢字 <|endoftext|> x", "one two three " * 12, " "]


def write_embedder(folder, mode="lasttoken", normalize=True, head=True):
    """Writes the model, always with the same weights, and returns transformers' model.

    `head`: tied to the embedding as in Qwen3-Embedding-0.6B; otherwise there is none, as in e5-mistral.
    """
    tokenizer = _tokenizer()
    torch.manual_seed(3)
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=SIZE,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=head,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "norm" in name else 0.15) + ("norm" in name))
    model.eval().save_pretrained(folder)
    if head:
        config = json.loads((folder / "config.json").read_text())
        _write(folder / "config.json", config | {"architectures": ["Qwen3ForCausalLM"]})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": TURN_END, "pad_token": END})
    write_modules(folder, mode, normalize)
    return model


def write_modules(folder, mode, normalize=True):
    """Writes the files that describe the pooling."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    _write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ],
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in MODES}
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": SIZE, "include_prompt": True, **modes})


def token_ids(folder, text):
    """Token ids of a text with its special tokens; an end token inside the text is spelled out."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spelled = [tokenizer.token_to_id(letter) for letter in END]
    ids = []
    for piece in text.split(END):
        ids += [*spelled, *tokenizer.encode(piece).ids[:-1]]
    return [*ids[len(spelled) :], tokenizer.token_to_id(END)]


def states(model, ids):
    """[len(ids), SIZE] float32: the hidden states after the last norm."""
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def _tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, TURN_END])
    ending = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    return tokenizer


def _write(path, value):
    path.write_text(json.dumps(value))
