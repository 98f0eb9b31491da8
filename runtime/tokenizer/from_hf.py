"""A tokenizer out of a Hugging Face folder: tokenizer.json, with what the configs beside it say about it.

Knows: those files' fields. Must not know: weights, GGUF.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import (
    AddedToken,
    TokenizerDefinition,
    byte_level_token_bytes,
    is_text_token,
    sentencepiece_token_bytes,
)

_BPE_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_NESTED = ("normalizers", "pretokenizers", "decoders", "processors")


def definition_from_folder(folder: Path, vocab_size: int | None = None) -> TokenizerDefinition:
    """The tokenizer in the folder; `vocab_size` is the number of logits, config.json's vocab_size if not given.

    Raises ModelNotFound without tokenizer.json, CorruptModel or UnsupportedModel.
    """
    source = read_json_object(folder / "tokenizer.json")
    beside = ("tokenizer_config", "generation_config", "config")
    configs = [_read_json_if_exists(folder / f"{name}.json") for name in beside]
    try:
        return _definition(source, configs, vocab_size, folder)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower, and a wrong field may fail anywhere
        raise CorruptModel(f"{folder / 'tokenizer.json'} contradicts itself; download it again") from error


def _read_json_if_exists(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _definition(
    source: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], vocab_size: int | None, folder: Path
) -> TokenizerDefinition:
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModel(f"the tokenizer {model['type']!r:.40} is not supported; there is BPE")
    vocab: dict[str, int] = model["vocab"]
    vocab_size = vocab_size or configs[2].get("vocab_size") or 1 + max([*vocab.values(), *_ids(source)])
    if type(vocab_size) is not int or not max(vocab.values()) < vocab_size <= 2**24:
        raise CorruptModel(f"the tokenizer has the id {max(vocab.values())}, the model {vocab_size!r:.20} rows")
    added_tokens, control = _added_tokens(source, model, vocab_size)
    plain, start, prefix_after_control = _backends(source, model, set(added_tokens))
    ids = vocab | {text: token.id for text, token in added_tokens.items()}
    eos_ids = _eos_ids(configs, ids, vocab_size)
    bos_id = _token_id(configs[0].get("bos_token"), ids)
    if bos_id is None and type(configs[2].get("bos_token_id")) is int:
        bos_id = configs[2]["bos_token_id"]
    if bos_id is not None and not 0 <= bos_id < vocab_size:
        raise CorruptModel(f"bos_token_id {bos_id} is beyond the {vocab_size} tokens")
    control |= {*eos_ids} | ({bos_id} if bos_id is not None else set())
    named = configs[0].get("add_bos_token")
    return TokenizerDefinition(
        plain=plain,
        start=start,
        prefix_after_control=prefix_after_control,
        added_tokens=added_tokens,
        control_ids=frozenset(control),
        token_bytes=_token_bytes(source, vocab, added_tokens, control, vocab_size),
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=named if isinstance(named, bool) else _post_processor_adds(source, bos_id, ids),
        chat_template=_template(folder, configs[0]),
        suffix_ids=_suffix_ids(source, configs[0], ids, vocab_size),
    )


def _ids(source: Mapping[str, Any]) -> list[int]:
    return [token["id"] for token in source.get("added_tokens") or ()]


def _added_tokens(
    source: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, AddedToken], set[int]]:
    """The added tokens the template may name, and the ids of those that are not text.

    One that is text and that BPE makes by itself (a run of spaces, say) stays an ordinary token, as does one that the
    backends find in any text (see `_plain_text_added_tokens`). One beyond the width has no logit, so it is left out.
    """
    added_tokens: dict[str, AddedToken] = {}
    control: set[int] = set()
    made: set[str] | None = None
    for token in source.get("added_tokens") or ():
        text, special = str(token["content"]), bool(token.get("special"))
        if not text or not 0 <= token["id"] < vocab_size:
            continue
        if _is_plain_text_added_token(token, model):
            continue
        if not special and text in model["vocab"]:
            made = made if made is not None else {"".join(_split_merge(merge)) for merge in model["merges"]}
            if text in made or len(text) == 1:
                continue
        added_tokens[text] = AddedToken(token["id"], bool(token.get("lstrip")), bool(token.get("rstrip")))
        if special:
            control.add(token["id"])
    return added_tokens, control


def _is_plain_text_added_token(token: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the added token is white space or a tag, which everybody's text may hold."""
    text = str(token["content"])
    return not token.get("special") and is_text_token(text) and model["vocab"].get(text) == token["id"]


def _plain_text_added_tokens(source: Mapping[str, Any], model: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """The added tokens that `tokenizers` finds in plain text, as the file has them."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return [
        tokenizers.AddedToken(str(token["content"]), **{flag: bool(token.get(flag)) for flag in flags})
        for token in source.get("added_tokens") or ()
        if _is_plain_text_added_token(token, model)
    ]


def _split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """A merge, written "left right" in old files and ["left", "right"] in new ones."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _backends(
    source: Mapping[str, Any], model: Mapping[str, Any], added_tokens: set[str]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, bool]:
    """(continues a text, begins one, whether text after a control token begins one)"""
    unreachable = added_tokens & model["vocab"].keys()
    vocab, merges = model["vocab"], [_split_merge(merge) for merge in model["merges"]]
    options = {name: model[name] for name in _BPE_OPTIONS if model.get(name) is not None}
    if unreachable:
        # BPE must not be able to produce an added token; the unknown token may stay, it has no merges.
        kept = {options.get("unk_token")} if not options.get("ignore_merges") else set()
        vocab = {text: i for text, i in vocab.items() if text not in unreachable or text in kept}
        merges = [m for m in merges if not ({m[0], m[1], m[0] + m[1]} & unreachable)]
        if options.get("unk_token") not in vocab:
            options.pop("unk_token", None)
    bpe = models.BPE(vocab, merges, **options)
    prefixes = _prefix_schemes(source)
    start = _build_backend(bpe, source, without_prefix=False)
    plain = _build_backend(bpe, source, without_prefix=True) if prefixes else start
    for backend in {id(start): start, id(plain): plain}.values():
        backend.add_tokens(_plain_text_added_tokens(source, model))
    return plain, start, "always" in prefixes


def _build_backend(model: Any, source: Mapping[str, Any], *, without_prefix: bool) -> tokenizers.Tokenizer:
    """A tokenizer around the shared model, with the file's normalizer and pre-tokenizer."""
    steps = {key: source.get(key) for key in ("normalizer", "pre_tokenizer")}
    if without_prefix:
        steps = {key: _without_prefix_space(step) for key, step in steps.items()}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": empty, **steps}))
    backend = tokenizers.Tokenizer(model)
    if shell.normalizer is not None:
        backend.normalizer = shell.normalizer
    if shell.pre_tokenizer is not None:
        backend.pre_tokenizer = shell.pre_tokenizer
    return backend


def _iter_steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """The step and those nested in it."""
    if isinstance(step, Mapping):
        yield step
        for key in _NESTED:
            for inner in step.get(key) or ():
                yield from _iter_steps(inner)


def _metaspace_scheme(step: Mapping[str, Any]) -> str:
    return str(step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never"))


def _prefix_schemes(source: Mapping[str, Any]) -> set[str]:
    """When the file's steps put a space before the text: "always" (after a control token too) or "first"."""
    found: set[str] = set()
    for step in [*_iter_steps(source.get("normalizer")), *_iter_steps(source.get("pre_tokenizer"))]:
        kind = step.get("type")
        if kind == "Prepend" or (kind == "ByteLevel" and step.get("add_prefix_space")):
            found.add("always")
        elif kind == "Metaspace":
            found.add(_metaspace_scheme(step))
    return found - {"never"}


def _without_prefix_space(step: Any) -> Any:
    """The same step without the space before the text; None if that was all it did."""
    if not isinstance(step, Mapping) or step.get("type") == "Prepend":
        return None
    changed = dict(step)
    if step.get("type") == "ByteLevel":
        changed["add_prefix_space"] = False
    elif step.get("type") == "Metaspace":
        changed |= {"prepend_scheme": "never"}
        changed.pop("add_prefix_space", None)
    for key in _NESTED:
        if key in step:
            changed[key] = [inner for inner in map(_without_prefix_space, step[key]) if inner is not None]
    return changed


def _token_bytes(
    source: Mapping[str, Any],
    vocab: Mapping[str, int],
    added_tokens: Mapping[str, AddedToken],
    control: set[int],
    vocab_size: int,
) -> tuple[bytes, ...]:
    kinds = {step.get("type") for step in _iter_steps(source.get("decoder"))}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise UnsupportedModel("tokenizer.json has a decoder that is neither byte-level nor SentencePiece's")
    to_bytes = byte_level_token_bytes if "ByteLevel" in kinds else sentencepiece_token_bytes
    found = [b""] * vocab_size
    for text, i in vocab.items():
        found[i] = to_bytes(text)
    for text, token in added_tokens.items():
        found[token.id] = text.encode("utf-8", "replace")
    for i in control:
        found[i] = b""
    return tuple(found)


def _token_id(token: Any, ids: Mapping[str, int]) -> int | None:
    """The id of a token written as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return ids.get(text) if isinstance(text, str) else None


def _eos_ids(configs: Sequence[Mapping[str, Any]], ids: Mapping[str, int], vocab_size: int) -> tuple[int, ...]:
    """Every id that any of the configs calls the end of a text, the tokenizer's own first."""
    found = [_token_id(configs[0].get("eos_token"), ids)]
    for config in configs[1:]:
        named = config.get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    eos_ids = tuple(dict.fromkeys(i for i in found if type(i) is int and 0 <= i < vocab_size))
    if not eos_ids:
        raise CorruptModel("no config in the folder names a token that ends a text (eos_token_id)")
    return eos_ids


def _post_processor_adds(source: Mapping[str, Any], bos_id: int | None, ids: Mapping[str, int]) -> bool:
    """Whether tokenizer.json's own template begins a single text with the BOS token."""
    for step in _iter_steps(source.get("post_processor")):
        for part in (step.get("single") or ())[:1]:
            if bos_id is not None and ids.get(part.get("SpecialToken", {}).get("id")) == bos_id:
                return True
    return False


def _suffix_ids(
    source: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], vocab_size: int
) -> tuple[int, ...]:
    """The tokens that tokenizer.json's own template puts behind a single text, or else the config's `add_eos_token`."""
    for step in _iter_steps(source.get("post_processor")):
        single = list(step.get("single") or ())
        named = step.get("special_tokens") or {}
        text = max((at for at, part in enumerate(single) if "Sequence" in part), default=len(single))
        behind = [i for part in single[text + 1 :] for i in named[part["SpecialToken"]["id"]]["ids"]]
        if any(type(i) is not int or not 0 <= i < vocab_size for i in behind):
            raise CorruptModel("the post_processor of tokenizer.json ends a text with a token that is not there")
        if behind:
            return tuple(behind)
    end = _token_id(config.get("eos_token"), ids) if config.get("add_eos_token") is True else None
    return () if end is None else (end,)


def _template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    source: Any = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_bytes()[: 2**20].decode("utf-8")
    if isinstance(source, list):  # several by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CorruptModel("chat_template in tokenizer_config.json is not a text")
    return ChatTemplate(source, _text(config.get("bos_token")), _text(config.get("eos_token")))


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
