"""Which class runs which architecture: one line per model family.

Knows: names and classes. Must not know: files.
"""

from __future__ import annotations

from plait.runtime.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {
    "llama": LlamaModel,
}
