"""Every kernel against the goldens of its contract, with and without metadata, in every row order and cache layout."""

from typing import Any

import pytest

from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import check_kernel, run_golden
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Contract, OpaqueSpec
from polydraft.contracts.composite import Composite
from polydraft.contracts.inputs import default_cases
from polydraft.reference.table import kernel_names
from polydraft_emulator import Emulator

KERNELS: list[Contract | Composite] = [COMPOSITES[name] if name in COMPOSITES else REGISTRY[name] for name in kernel_names()]


def takes_metadata(kernel: Contract | Composite) -> bool:
    contracts = kernel.contracts if isinstance(kernel, Composite) else (kernel,)
    specs = [spec for contract in contracts for spec in contract.args.specs().values()]
    return any(isinstance(spec, OpaqueSpec) and spec.kind == "meta" for spec in specs)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_equals_golden(kernel: Contract | Composite):
    plugin = Emulator("?seed=11&rows=seeded")
    device: Any = plugin.polydraft_open_device("", DeviceOptions())
    table, hook = plugin.polydraft_kernels(device), plugin.polydraft_init_forward_meta
    metas: tuple[Any, ...] = (None, hook) if takes_metadata(kernel) else (None,)
    compared = 0
    for case in default_cases(kernel):
        want = run_golden(kernel, case)
        for init_meta in metas:
            result = check_kernel(kernel, case, device, table, init_meta=init_meta, want=want)
            compared += result.elements
            if not result.ok:
                pytest.fail(result.describe(), pytrace=False)
    assert compared > 100


def test_the_table_is_what_the_reference_owns():
    plugin = Emulator()
    table = plugin.polydraft_kernels(plugin.polydraft_open_device("", DeviceOptions()))
    assert sorted(table.providers) == kernel_names()
    assert dict(table.versions) == dict(plugin.polydraft_backend_info("").contract_versions)
