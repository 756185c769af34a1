"""The package of contracts: complete when a name is taken from it, and free of contracts until then.

This tests what `polydraft/contracts/__init__.py` promises, not single contracts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.contracts import REGISTRY, kernels
from polydraft.contracts.base import Registry
from polydraft.errors import ContractError

KERNELS = Path(kernels.__file__).parent


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LOADED = "import sys; print([m for m in sys.modules if m.startswith('polydraft.contracts.') and m.endswith('pack_rows')])"


@pytest.mark.parametrize("module", ["polydraft", "polydraft.contracts", "polydraft.backend", "polydraft.contracts.base"])
def test_importing_it_loads_no_contract(module: str) -> None:
    assert python(f"import {module}; {LOADED}") == "[]"


@pytest.mark.parametrize("first", ["REGISTRY", "COMPOSITES", "SampleV1"])
def test_taking_any_name_loads_every_module_of_contracts(first: str) -> None:
    code = f"from polydraft.contracts import {first}; from polydraft.contracts.base import REGISTRY; print(*REGISTRY.names())"
    assert python(code).split() == sorted(path.stem for path in KERNELS.glob("[!_]*.py"))


@pytest.mark.parametrize("first", ["spread_logits", "argmax"])
def test_the_order_does_not_depend_on_which_module_is_imported_first(first: str) -> None:
    code = f"import polydraft.contracts.kernels.{first}; from polydraft.contracts import REGISTRY; print(*REGISTRY.names())"
    names = python(code).split()
    assert names == sorted(names)


def test_every_record_is_exported() -> None:
    from polydraft import contracts

    assert all(getattr(contracts, contract.args.__name__) is contract.args for contract in contracts.REGISTRY)
    assert all(hasattr(contracts, name) for name in contracts.__all__)


@pytest.mark.parametrize("name", ["PackRowsV9", "pack_rows", "ORDER"])
def test_a_wrong_name_is_an_attribute_error(name: str) -> None:
    from polydraft import contracts

    with pytest.raises(AttributeError, match=name):
        getattr(contracts, name)


def test_looking_for_a_submodule_loads_no_contract() -> None:
    assert python(f"from polydraft.contracts import layout; {LOADED}") == "[]"


def test_what_was_added_can_be_removed() -> None:
    registry = Registry()
    linear = registry.add(REGISTRY["linear"])
    registry.add(REGISTRY["embed"])
    assert registry.remove("linear") is linear
    assert registry.names() == ["embed"]
    with pytest.raises(ContractError, match=r"^no contract is named 'linear'; known: embed$"):
        registry.remove("linear")
    assert registry.add(linear) is linear, "and added again"
    assert registry.names() == ["embed", "linear"]
