"""The registry, the family folders, the test cases and the table in docs/models.md name the same families."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import gguf
import pytest
from family_cases import FAMILY_CASES, FamilyCase

from plait.runtime.models import families
from plait.runtime.models.decoder import Decoder
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.registry import FAMILIES, FAMILIES_BY_NAME, FAMILY_NAMES, decoder_class, index_families
from plait.runtime.weights.checkpoint import open_checkpoint

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_every_family_folder_is_registered() -> None:
    folders = {path.parent.name for path in Path(families.__path__[0]).glob("*/config.py")}
    missing, unknown = sorted(folders - set(FAMILY_NAMES)), sorted(set(FAMILY_NAMES) - folders)
    assert not missing, f"add {missing} to FAMILY_NAMES in runtime/models/registry.py"
    assert not unknown, f"{unknown} of FAMILY_NAMES have no folder with a config.py in runtime/models/families"


def test_every_family_has_a_test_case() -> None:
    missing, unknown = sorted(set(FAMILY_NAMES) - FAMILY_CASES.keys()), sorted(FAMILY_CASES.keys() - set(FAMILY_NAMES))
    assert not missing, f"add a FamilyCase for {missing} to FAMILY_CASES in tests/support/models/family_cases.py"
    assert not unknown, f"{unknown} of FAMILY_CASES are not in FAMILY_NAMES in runtime/models/registry.py"


def family_case(family: ModelFamily) -> FamilyCase:
    """The family's test case; the test fails with the place to add it where it is missing."""
    if family.name not in FAMILY_CASES:
        text = "has no test case: add a FamilyCase to FAMILY_CASES in tests/support/models/family_cases.py"
        pytest.fail(f"the family {family.name!r} {text}")
    return FAMILY_CASES[family.name]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_test_case_fits_the_family(family: ModelFamily) -> None:
    case = family_case(family)
    assert case.model_class.__name__ == family.hf_architectures[0]
    assert (case.packed_variants is not None) == family.has_packed_cpu


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_docs_table_has_a_row_for_the_family(family: ModelFamily) -> None:
    architecture, gguf_arch = family.hf_architectures[0], family_case(family).gguf_arch
    rows = [line for line in DOCS.read_text().splitlines() if f"| `{architecture}` |" in line]
    place = "the table of families in docs/models.md"
    assert rows, f"{place} has no row for {family.name!r}: add one with `{architecture}` under Hugging Face"
    assert len(rows) == 1, f"{place} has {len(rows)} rows with `{architecture}`"
    if gguf_arch is not None:
        name = gguf.MODEL_ARCH_NAMES[gguf_arch]
        assert f"`{name}`" in rows[0], f"{place}: the row of {family.name!r} must have `{name}` under GGUF"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_decoder_class_is_a_decoder(family: ModelFamily, tmp_path: Path) -> None:
    family_case(family).build().save_pretrained(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert config.architecture == family.name
    assert issubclass(decoder_class(config), Decoder)


def test_only_optional_differences_have_defaults() -> None:
    optional = {f.name for f in fields(ModelFamily) if f.default is not MISSING or f.default_factory is not MISSING}
    names = {"gguf_layer_names", "hf_layer_names"}
    assert optional == names | {"gguf_has_experts", "joint_qk_norms", "layer_norms", "packed_layer"}
    with pytest.raises(TypeError, match="has_packed_cpu"):
        ModelFamily(name="new")  # type: ignore[call-arg]


def test_a_family_with_half_of_its_gguf_fields_is_rejected() -> None:
    with pytest.raises(ValueError, match="read_gguf_config"):
        replace(FAMILIES_BY_NAME["llama"], read_gguf_config=None)


def test_two_families_with_one_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="llama and qwen3"):
        index_families(("LlamaForCausalLM", FAMILIES_BY_NAME[name]) for name in ("llama", "qwen3"))


def test_reading_configs_loads_neither_torch_nor_llvmlite() -> None:
    code = "import sys, plait.runtime.models.registry; print({'torch', 'llvmlite'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
