"""Builds a tokenizer from a Hugging Face folder: tokenizer.json and the config files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from plait.constrained.tokens.tokenizer_file import is_panic
from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import (
    AddedToken,
    Backends,
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
    """Builds the tokenizer. `vocab_size` is the model's number of logits; by default it is read from config.json.

    Raises ModelNotFound if there is no tokenizer.json, CorruptModel or UnsupportedModel.
    """
    source = read_json_object(folder / "tokenizer.json")
    config_names = ("tokenizer_config", "generation_config", "config")
    configs = [_read_json_if_exists(folder / f"{name}.json") for name in config_names]
    try:
        return _definition(source, configs, vocab_size, folder)
    except ModelError:
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception or panics; a wrong field may fail anywhere
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptModel(f"{folder / 'tokenizer.json'} is inconsistent; download it again") from error


def _read_json_if_exists(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _definition(
    source: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], vocab_size: int | None, folder: Path
) -> TokenizerDefinition:
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModel(f"the tokenizer {model['type']!r:.40} is not supported; only BPE is")
    vocab: dict[str, int] = model["vocab"]
    vocab_size = vocab_size or configs[2].get("vocab_size") or 1 + max([*vocab.values(), *_ids(source)])
    if type(vocab_size) is not int or not max(vocab.values()) < vocab_size <= 2**24:
        raise CorruptModel(
            f"the tokenizer has the id {max(vocab.values())}, but the embedding has {vocab_size!r:.20} rows"
        )
    added_tokens, control = _added_tokens(source, model, vocab_size)
    continuation_backend, initial_backend, prefix_after_control = _backends(source, model, set(added_tokens))
    ids = vocab | {text: token.id for text, token in added_tokens.items()}
    eos_ids = _eos_ids(configs, ids, vocab_size)
    bos_id = _token_id(configs[0].get("bos_token"), ids)
    if bos_id is None and type(configs[2].get("bos_token_id")) is int:
        bos_id = configs[2]["bos_token_id"]
    if bos_id is not None and not 0 <= bos_id < vocab_size:
        raise CorruptModel(f"bos_token_id {bos_id} is beyond the {vocab_size} tokens")
    control |= {*eos_ids} | ({bos_id} if bos_id is not None else set())
    add_bos = configs[0].get("add_bos_token")
    return TokenizerDefinition(
        backends=Backends.of(continuation_backend, initial_backend),
        prefix_after_control=prefix_after_control,
        added_tokens=added_tokens,
        control_ids=frozenset(control),
        token_bytes=_token_bytes(source, vocab, added_tokens, control, vocab_size),
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=add_bos if isinstance(add_bos, bool) else _post_processor_adds(source, bos_id, ids),
        chat_template=_template(folder, configs[0]),
        suffix_ids=_suffix_ids(source, configs[0], ids, vocab_size),
    )


def _ids(source: Mapping[str, Any]) -> list[int]:
    return [token["id"] for token in source.get("added_tokens") or ()]


def _added_tokens(
    source: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, AddedToken], set[int]]:
    """Returns the added tokens that control text may contain, and the ids of those that are not text.

    An added token that is text and that BPE also builds by merges (e.g. spaces) stays an ordinary token, as does
    one that the backends match in any text (see `_plain_text_added_tokens`). A token beyond `vocab_size` has no logit
    and is omitted.
    """
    added_tokens: dict[str, AddedToken] = {}
    control: set[int] = set()
    mergeable: set[str] | None = None
    for token in source.get("added_tokens") or ():
        text, special = str(token["content"]), bool(token.get("special"))
        if not text or not 0 <= token["id"] < vocab_size:
            continue
        if _is_plain_text_added_token(token, model):
            continue
        if not special and text in model["vocab"]:
            if mergeable is None:
                mergeable = {"".join(_split_merge(merge)) for merge in model["merges"]}
            if text in mergeable or len(text) == 1:
                continue
        added_tokens[text] = AddedToken(token["id"], bool(token.get("lstrip")), bool(token.get("rstrip")))
        if special:
            control.add(token["id"])
    return added_tokens, control


def _is_plain_text_added_token(token: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the added token is ordinary text (`is_text_token`), which user text may contain."""
    text = str(token["content"])
    return not token.get("special") and is_text_token(text) and model["vocab"].get(text) == token["id"]


def _plain_text_added_tokens(source: Mapping[str, Any], model: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Returns the added tokens that are matched in plain text, too, with the flags of the file."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return [
        tokenizers.AddedToken(str(token["content"]), **{flag: bool(token.get(flag)) for flag in flags})
        for token in source.get("added_tokens") or ()
        if _is_plain_text_added_token(token, model)
    ]


def _split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """Splits a merge: "left right" in old files, ["left", "right"] in new ones."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _backends(
    source: Mapping[str, Any], model: Mapping[str, Any], added_tokens: set[str]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, bool]:
    """Returns (continuation backend, initial backend, whether text after a control token is initial text)."""
    unreachable = added_tokens & model["vocab"].keys()
    vocab, merges = model["vocab"], [_split_merge(merge) for merge in model["merges"]]
    options = {name: model[name] for name in _BPE_OPTIONS if model.get(name) is not None}
    if unreachable:
        # BPE must not produce an added token. The unknown token may remain: it has no merges.
        allowed = {options.get("unk_token")} if not options.get("ignore_merges") else set()
        vocab = {text: i for text, i in vocab.items() if text not in unreachable or text in allowed}
        merges = [(left, right) for left, right in merges if not ({left, right, left + right} & unreachable)]
        if options.get("unk_token") not in vocab:
            options.pop("unk_token", None)
    bpe = models.BPE(vocab, merges, **options)
    prefixes = _prefix_schemes(source)
    initial = _build_backend(bpe, source, without_prefix=False)
    continuation = _build_backend(bpe, source, without_prefix=True) if prefixes else initial
    for backend in [initial, continuation] if prefixes else [initial]:
        backend.add_tokens(_plain_text_added_tokens(source, model))
    return continuation, initial, "always" in prefixes


def _build_backend(model: Any, source: Mapping[str, Any], *, without_prefix: bool) -> tokenizers.Tokenizer:
    """Builds a tokenizer from the shared BPE model and the file's normalizer and pre-tokenizer."""
    steps = {key: source.get(key) for key in ("normalizer", "pre_tokenizer")}
    if without_prefix:
        steps = {key: _without_prefix_space(step) for key, step in steps.items()}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    template = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": empty, **steps}))
    backend = tokenizers.Tokenizer(model)
    if template.normalizer is not None:
        backend.normalizer = template.normalizer
    if template.pre_tokenizer is not None:
        backend.pre_tokenizer = template.pre_tokenizer
    return backend


def _iter_steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the step and all steps nested in it."""
    if isinstance(step, Mapping):
        yield step
        for key in _NESTED:
            for inner in step.get(key) or ():
                yield from _iter_steps(inner)


def _metaspace_scheme(step: Mapping[str, Any]) -> str:
    return str(step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never"))


def _prefix_schemes(source: Mapping[str, Any]) -> set[str]:
    """Returns which texts get a leading space: "always" (also after control tokens), "first", both, or none (empty)."""
    schemes: set[str] = set()
    for step in [*_iter_steps(source.get("normalizer")), *_iter_steps(source.get("pre_tokenizer"))]:
        kind = step.get("type")
        if kind == "Prepend" or (kind == "ByteLevel" and step.get("add_prefix_space")):
            schemes.add("always")
        elif kind == "Metaspace":
            schemes.add(_metaspace_scheme(step))
    return schemes - {"never"}


def _without_prefix_space(step: Any) -> Any:
    """Returns the step without its space before the text, or None if it does nothing else."""
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
    token_bytes = [b""] * vocab_size
    for text, i in vocab.items():
        token_bytes[i] = to_bytes(text)
    for text, token in added_tokens.items():
        token_bytes[token.id] = text.encode("utf-8", "replace")
    for i in control:
        token_bytes[i] = b""
    return tuple(token_bytes)


def _token_id(token: Any, ids: Mapping[str, int]) -> int | None:
    """Returns the id of a token that a config gives as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return ids.get(text) if isinstance(text, str) else None


def _eos_ids(configs: Sequence[Mapping[str, Any]], ids: Mapping[str, int], vocab_size: int) -> tuple[int, ...]:
    """Returns the EOS ids of all configs, that of the tokenizer config first."""
    candidates = [_token_id(configs[0].get("eos_token"), ids)]
    for config in configs[1:]:
        config_ids = config.get("eos_token_id")
        candidates += config_ids if isinstance(config_ids, list) else [config_ids]
    eos_ids = tuple(dict.fromkeys(i for i in candidates if type(i) is int and 0 <= i < vocab_size))
    if not eos_ids:
        raise CorruptModel("no config in the folder names an end-of-sequence token (eos_token_id)")
    return eos_ids


def _post_processor_adds(source: Mapping[str, Any], bos_id: int | None, ids: Mapping[str, int]) -> bool:
    """Whether the post-processor of tokenizer.json puts the BOS token before a single text."""
    for step in _iter_steps(source.get("post_processor")):
        for part in (step.get("single") or ())[:1]:
            if bos_id is not None and ids.get(part.get("SpecialToken", {}).get("id")) == bos_id:
                return True
    return False


def _suffix_ids(
    source: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int], vocab_size: int
) -> tuple[int, ...]:
    """Returns the tokens that the post-processor appends to a single text, or EOS if the config has `add_eos_token`."""
    for step in _iter_steps(source.get("post_processor")):
        single = list(step.get("single") or ())
        special_tokens = step.get("special_tokens") or {}
        text_index = max((index for index, part in enumerate(single) if "Sequence" in part), default=len(single))
        suffix = [i for part in single[text_index + 1 :] for i in special_tokens[part["SpecialToken"]["id"]]["ids"]]
        if any(type(i) is not int or not 0 <= i < vocab_size for i in suffix):
            raise CorruptModel(
                "the post_processor of tokenizer.json ends a text with a token that the vocabulary lacks"
            )
        if suffix:
            return tuple(suffix)
    eos_id = _token_id(config.get("eos_token"), ids) if config.get("add_eos_token") is True else None
    return () if eos_id is None else (eos_id,)


def _template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    source: Any = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_bytes()[: 2**20].decode("utf-8")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CorruptModel("chat_template in tokenizer_config.json is not a text")
    return ChatTemplate(source, _text(config.get("bos_token")), _text(config.get("eos_token")))


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
