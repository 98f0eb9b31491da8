"""The registry, the modules of families, the test cases and the table in docs/models.md name the same families."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import gguf
import pytest
from family_cases import FAMILY_CASES, FamilyCase

from plait.runtime.models import families
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.registry import FAMILIES, FAMILIES_BY_NAME, index_families
from plait.runtime.weights.checkpoint import open_checkpoint

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_every_defined_family_is_registered() -> None:
    modules = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]
    defined = {value.name for module in modules for value in vars(module).values() if isinstance(value, ModelFamily)}
    assert defined, "no module of runtime/models/families defines a family"
    assert defined <= FAMILIES_BY_NAME.keys(), "add it to FAMILIES in runtime/models/registry.py"


def test_every_family_has_a_test_case() -> None:
    missing, unknown = sorted(FAMILIES_BY_NAME.keys() - FAMILY_CASES), sorted(FAMILY_CASES.keys() - FAMILIES_BY_NAME)
    assert not missing, f"add a FamilyCase for {missing} to FAMILY_CASES in tests/support/models/family_cases.py"
    assert not unknown, f"{unknown} of FAMILY_CASES are not in FAMILIES in runtime/models/registry.py"


def family_case(family: ModelFamily) -> FamilyCase:
    """The family's test case; the test fails with the place to add it where it is missing."""
    if family.name not in FAMILY_CASES:
        text = "has no test case: add a FamilyCase to FAMILY_CASES in tests/support/models/family_cases.py"
        pytest.fail(f"the family {family.name!r} {text}")
    return FAMILY_CASES[family.name]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_test_case_fits_the_family(family: ModelFamily) -> None:
    assert family_case(family).model_class.__name__ == family.hf_architectures[0]


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
def test_architecture_is_the_name_of_the_family(family: ModelFamily, tmp_path: Path) -> None:
    family_case(family).build().save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).config.architecture == family.name


def test_only_optional_differences_have_defaults() -> None:
    optional = {f.name for f in fields(ModelFamily) if f.default is not MISSING or f.default_factory is not MISSING}
    names = {"gguf_layer_names", "hf_layer_names"}
    assert optional == names | {"gguf_has_experts", "layer"}
    with pytest.raises(TypeError, match="gguf_permuted_qk"):
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
