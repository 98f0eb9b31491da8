"""Tiny models that several ranks and one process run."""

import pytest
from family_cases import FAMILY_CASES
from rank_runs import PAGES, VOCAB, run_calls, single_runner
from tiny_hf_models import randomized

from plait.constrained.compile_service import worker_process

TWO_LAYERS = {family: {"num_hidden_layers": 2} for family in FAMILY_CASES}
FOUR_LAYERS = {"num_hidden_layers": 4}  # of the variant that four stages compute
TWO_LAYERS["gemma3"]["layer_types"] = ["sliding_attention", "full_attention"]


@pytest.fixture(autouse=True)
def slow_start(monkeypatch):
    """The compile process may start slowly while several ranks do."""
    monkeypatch.setattr(worker_process, "START_LIMIT_S", 200.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder(family, variant)`: a tiny random model of it, saved once."""
    saved = {}

    def save(family, variant=""):
        if (family, variant) not in saved:
            saved[family, variant] = tmp_path_factory.mktemp("model")
            changes = dict(vocab_size=VOCAB, max_position_embeddings=256)
            if not variant:
                changes |= TWO_LAYERS[family]
            elif (family, variant) == ("llama", "MHA, untied, biases"):
                changes |= FOUR_LAYERS
            model = randomized(FAMILY_CASES[family].build(variant, **changes))
            model.save_pretrained(saved[family, variant])
        return saved[family, variant]

    return save


@pytest.fixture(scope="session")
def expected(folder):
    """`expected(family, variant)`: what `run_calls` returns in one process."""
    outcomes = {}

    def run(family, variant=""):
        if (family, variant) not in outcomes:
            runner = single_runner(folder(family, variant), max_pages=PAGES)
            outcomes[family, variant] = run_calls(runner)
        return outcomes[family, variant]

    return run
