"""Modes of kernels: which there are of a backend, and on whose device each is tried."""

from __future__ import annotations

import dataclasses

import pytest

from polydraft import reference
from polydraft.conformance.modes import Mode, further_modes
from polydraft.conformance.target import Target, wrap
from polydraft.contracts.inputs import kernel_of


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("swiglu", ["bf16", "f32, row-invariant"]),
        ("residual_add+rms_norm", ["bf16", "f32, row-invariant"]),
        ("rope_kv_write", ["bf16", "f32, row-invariant", "f32, rows in int8", "f32, rows in fp8"]),
        ("verify_match", []),
        ("linear", ["bf16", "f32, row-invariant", "f32, packed as int8-channel", "f32, packed as fp8-block128"]),
    ],
)
def test_every_way_in_which_a_kernel_is_declared_to_compute(name: str, wanted: list[str]):
    declared = dataclasses.replace(
        Target("reference").info.capabilities,
        dtypes=("f32", "bf16"),
        weight_packings=("int8-channel", "fp8-channel", "fp8-block128"),
    )
    modes = list(further_modes(kernel_of(name), declared))
    assert [mode.name for mode in modes] == wanted
    target = Target(wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(info, capabilities=declared)))
    here = [mode.on_first_device(target) for mode in modes]
    assert here == [mode.act == "f32" and not mode.row_invariant for mode in modes]


@pytest.mark.parametrize("mode", [Mode("f32"), Mode("f32", kv="int8"), Mode("f32", packing="int4-group32")])
def test_cases_of_a_mode_share_their_weights_and_differ_in_contents(mode: Mode):
    kernel = kernel_of("rope_kv_write" if mode.kv else "linear")
    one, other = mode.cases(kernel, Target("reference"))
    assert one.n > 0
    assert mode.packing in ("", getattr(getattr(one.arrays.get("weight"), "packing", None), "name", ""))
    changed = next(name for name in ("x", "qkv") if name in one.arrays)
    assert (one.arrays[changed] != other.arrays[changed]).any()
    assert one.arrays[changed].shape == other.arrays[changed].shape
