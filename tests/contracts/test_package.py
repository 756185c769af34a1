"""The package of contracts: complete when a name is taken from it, and free of contracts until then.

Owns what `polydraft/contracts/__init__.py` promises.
Run by `make test`. Never looks at a single contract.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LOADED = "import sys; print([m for m in sys.modules if m.startswith('polydraft.contracts.') and m.endswith('pack_rows')])"


@pytest.mark.parametrize("module", ["polydraft", "polydraft.contracts", "polydraft.backend", "polydraft.contracts.base"])
def test_importing_it_loads_no_contract(module: str) -> None:
    assert python(f"import {module}; {LOADED}") == "[]"


@pytest.mark.parametrize("first", ["REGISTRY", "COMPOSITES", "SampleV1"])
def test_taking_any_name_loads_all_contracts_in_the_order_of_a_step(first: str) -> None:
    code = f"from polydraft.contracts import {first}, ORDER, REGISTRY; print(REGISTRY.names() == list(ORDER), len(ORDER))"
    assert python(code) == "True 45"


def test_every_record_is_exported() -> None:
    from polydraft import contracts

    assert {contract.args.__name__ for contract in contracts.REGISTRY} <= set(contracts.__all__)
    assert all(hasattr(contracts, name) for name in contracts.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    from polydraft import contracts

    with pytest.raises(AttributeError, match="PackRowsV9"):
        contracts.PackRowsV9  # noqa: B018


def test_the_order_does_not_depend_on_which_module_is_imported_first():
    first = "import polydraft.contracts.spread_logits; from polydraft.contracts import ORDER, REGISTRY"
    assert python(f"{first}; print(tuple(REGISTRY.names()) == ORDER)") == "True"
