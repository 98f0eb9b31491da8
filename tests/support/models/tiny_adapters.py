"""Random LoRA adapters of tiny models, made and merged by peft."""

from __future__ import annotations

import copy
import json

import gguf
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_hf_models import GGUF_ARCHITECTURES, PERMUTED, interleaved, run

from plait.runtime.kv_cache.radix_node import CacheNamespace

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def targets_of(model):
    """The linear layers of a model that plait adapts."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    modules = ATTENTION if "experts" in names else [*ATTENTION, *MLP, *FUSED]
    return [name for name in dict.fromkeys(modules) if name in names]


def outer_targets_of(model):
    """Its embedding, its output head and the first of its other ones."""
    return ["lm_head", "embed_tokens", targets_of(model)[0]]


def make_adapter(model, folder, seed, **settings):
    """Saves a random adapter of a transformers model, and returns the model with it merged in.

    peft cannot merge a bias into a layer without one, nor two updates into the one matrix of a tied embedding and head.
    """
    settings = {"r": 4, "lora_alpha": 8, "target_modules": targets_of(model)} | settings
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder)
    is_tied = model.config.tie_word_embeddings and {"lm_head", "embed_tokens"} & {*settings["target_modules"]}
    cannot_merge = is_tied or settings.get("lora_bias")
    return (adapted.base_model.model if cannot_merge else adapted.merge_and_unload()).eval()


def run_with(runner, rows):
    """`tiny_hf_models.run` of rows that each have the name of an adapter at the end; "" is none."""
    digests = {"": "", **runner.adapter_pool.names}
    return run(runner, [row[:-1] for row in rows], [CacheNamespace(adapter=digests[row[-1]]) for row in rows])


def write_gguf_adapter(model, folder, path, **metadata):
    """The adapter of `make_adapter` in `folder` as a GGUF file, as llama.cpp's converter names and orders its rows."""
    arch = GGUF_ARCHITECTURES[model.config.model_type]
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    fields = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", fields["lora_alpha"])
    for key, value in metadata.items():
        writer.add_string(key, value)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if "lora_" not in name:
            continue  # the model's own embedding and head
        module, part = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        if part == "lora_embedding_A":
            tensor = tensor.T.contiguous()
        part = part.replace("embedding_", "")
        if arch in PERMUTED and part == "lora_B" and module.rpartition(".")[2] in heads:
            tensor = interleaved(tensor, heads[module.rpartition(".")[2]])
        stored = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{stored}.{part.lower()}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
