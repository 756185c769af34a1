"""Sums by leaf: what a rank computes has the bits that one device has of it, on every backend that declares so, and the tree is
the one that is written down. Whole engines are compared in `tests/step/test_ranks_bits.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.conformance import leaf_checks
from polydraft.conformance.harness import run_golden, run_kernel
from polydraft.conformance.leaf_checks import checks
from polydraft.conformance.target import Target
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Case
from polydraft.contracts.compare import compare, from_host, to_host
from polydraft.contracts.inputs import default_cases
from polydraft.contracts.kernels import expert_leaves
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.contracts.kernels.swiglu import sigmoid, silu
from polydraft.models.block import laid_out
from polydraft.plugins.default_backend import default_backend
from polydraft.reference import invariant_kernels
from tests.conformance.doubles import BACKENDS

BY_NAME = {**BACKENDS, **({"cpu": "cpu"} if default_backend().name == "cpu" else {})}
CHECKS = {check.id.rpartition("/")[2]: check for check in checks()}


@pytest.mark.parametrize("backend", BY_NAME)
@pytest.mark.parametrize("name", CHECKS)
def test_backends_with_ordered_sums_pass(backend: str, name: str):
    result = CHECKS[name].result(Target(BY_NAME[backend]))
    assert result.outcome == "pass", result.message


def test_no_rank_keeps_a_share_of_columns_without_any(monkeypatch: pytest.MonkeyPatch):
    """Where shares are rounded up the last ranks may have nothing left, and no kernel multiplies nothing."""
    heights = []

    def noting(kernel: Any, case: Case, *rest: Any, **options: Any) -> Any:
        heights.append(len(case.arrays["weight"]))
        return run_kernel(kernel, case, *rest, **options)

    monkeypatch.setattr(leaf_checks, "run_kernel", noting)
    assert CHECKS["columns"].result(Target("reference")).outcome == "pass"
    assert min(heights) == 1, "the last share is there, and never empty"


@pytest.mark.parametrize("act", ["bf16", "f16"])
def test_experts_may_round_what_lies_between_their_products(act: str):
    """To the dtype of activations, though a sum is float32."""

    def golden(a: Any, n: int) -> None:
        half = a.gate_up.shape[1] // 2
        for r in range(n):
            total = np.zeros((a.leaves, a.x.shape[1]))
            for expert, weight in zip(a.expert_ids[r].tolist(), a.expert_weights[r], strict=True):
                if expert >= 0:
                    gate, up = np.split(a.gate_up[expert] @ a.x[r], [half])
                    between = from_host(to_host(np.array([silu(g) for g in gate]) * up, act), act)
                    for leaf, features, matrix in expert_leaves.terms_of(a, expert):
                        total[leaf] += weight * (matrix @ between[features])
            if a.shared is not None:
                shared = a.shared[r].reshape(total.shape)
                total += shared * (1.0 if a.shared_gate is None else sigmoid(a.shared_gate[r, 0]))
            a.out[r] = total.reshape(-1)

    contract = REGISTRY["expert_leaves"]
    for case in default_cases(contract):
        found = run_golden(contract, case, act, golden=golden)
        got = {name: to_host(one.value, one.dtype) for name, one in found.items()}
        compared = compare(contract, case, got, run_golden(contract, case, act))
        assert compared.ok, compared.describe()


def test_subtrees_over_ranks_make_up_the_tree():
    """Of four leaves, two ranks add two each, and the sums of these."""
    big, small = np.float32(1 << 24), np.float32(1)
    leaves = [np.asarray(one) for one in (big, small, small, -big)]
    assert tree_sum(leaves) == 1.0, "the first of two sums has lost a one"
    assert tree_sum([tree_sum(leaves[:2]), tree_sum(leaves[2:])]) == tree_sum(leaves)
    assert leaves[0] + leaves[1] + leaves[2] + leaves[3] == 0.0, "one after the other, both are lost"


def test_a_matrix_lies_leaf_by_leaf():
    matrix = np.arange(12, dtype=np.float32).reshape(2, 6)  # two outputs, six inputs
    assert laid_out(matrix, 0) is matrix
    assert laid_out(matrix, 3).tolist() == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    stack = np.stack((matrix, matrix + 100))
    np.testing.assert_array_equal(laid_out(stack, 3), np.concatenate((laid_out(matrix, 3), laid_out(matrix + 100, 3))))


@pytest.mark.parametrize(
    ("name", "check", "of_one_shape"),
    [
        ("_of_each_head", "heads", np.matmul),
        ("tiled_product", "columns", lambda weight, x: x @ weight.T),
    ],
)
def test_products_of_whatever_shape_do_not_pass(name: str, check: str, of_one_shape: Any, monkeypatch: pytest.MonkeyPatch):
    """BLAS adds in another order where outputs are more or fewer: what these kernels did before."""
    monkeypatch.setattr(invariant_kernels, name, of_one_shape)
    result = CHECKS[check].result(Target("reference"))
    assert result.outcome == "fail"
    assert "wanted the very bits of" in result.message


PLACES = """
import numpy as np
from polydraft.reference.invariant_kernels import tiled_product
for inputs in (1, 7, 8, 16, 23, 64, 90, 300, 385, 1000, 4096):
    weight, x = np.random.default_rng(inputs).standard_normal((2, inputs), np.float32)
    found = tiled_product(np.tile(weight, (77, 1)), np.tile(x, (13, 1)))
    assert np.unique(found).size == 1, (inputs, np.argwhere(found != found[0, 0])[:5].tolist())
"""
"""One row of weights at every place, and one row of x, have one product."""


@pytest.mark.parametrize("core", ["", "Nehalem", "Sandybridge", "Haswell", "SkylakeX"])
def test_a_product_has_the_same_bits_at_every_place_of_a_tile(core: str):
    """With OpenBLAS's kernels for this processor, and for others that it can do the work of."""
    if core == "SkylakeX" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    environment = {**os.environ, "OPENBLAS_CORETYPE": core} if core else None
    done = subprocess.run([sys.executable, "-c", PLACES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
