"""Code in a model folder (`auto_map`, custom modules) is never imported, nor any package that would do so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny_llama_checkpoints import save_tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LOAD = """
import sys
from pathlib import Path
from plait.runtime.config import engine_config
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.loading.pooling import read_pooling
from plait.runtime.tokenizer.tokenizer import load_tokenizer

folder = locate_model(sys.argv[1])
runner, _, _ = make_runner(engine_config(device="cpu", dtype="float32", max_pages=16), folder)
load_tokenizer(folder, vocab_size=runner.config.vocab_size)
read_pooling(folder)
print("transformers" in sys.modules, str(folder) in sys.path, any(name.startswith("modeling_") for name in sys.modules))
"""


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    save_tiny_llama(folder, vocab_size=256)
    classes = {
        name: f"modeling_x.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        nested = {"auto_map": classes, "tokenizer_class": "modeling_x.AutoTokenizer", "trust_remote_code": True}
        path.write_text(json.dumps(content | nested | {"vision_config": {"auto_map": classes}}))
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    code = f"open({str(marker)!r}, 'w')\n"
    for name in ("modeling_x.py", "__init__.py", "configuration_x.py", "tokenization_x.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    done = subprocess.run([sys.executable, "-P", "-c", LOAD, str(folder)], cwd=folder, capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 3, done.stderr
    assert not marker.exists()
