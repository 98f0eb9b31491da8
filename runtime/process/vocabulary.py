"""`load_vocabulary`: the tokens of a model, for grammars that are compiled without a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.constrained import Vocabulary


def load_vocabulary(model: str | None = None) -> Vocabulary:
    """Returns the vocabulary of a model that plait runs, for `plait.constrained.compile_grammar`. Loads no weights.

    `model`: as in `Runtime(model)`: a .gguf file, a folder, or a name. None: the embedded model. Raises ModelNotFound,
    CorruptModel or UnsupportedModel.

    >>> grammar = compile_grammar(Regex("[0-9]+"), plait.load_vocabulary())     # doctest: +SKIP
    """
    from plait.runtime.model_files.locate import locate_model  # lazy: importing plait's names loads no tokenizers
    from plait.runtime.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer(locate_model(model)).vocabulary
