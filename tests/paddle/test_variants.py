"""Paddle's fused operations as kernel packs: each is found by its name and holds its contract, on the CPU place where it can.

Operations without a kernel there are played by what Paddle's documentation says of them: that shows what a pack makes of the
operation, and nothing about the operation.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.depth import deep
from tests.support.paddle import forked, needs_paddle
from tests.support.project import ROOT, pyproject

sys.path.insert(0, str(ROOT / "backends" / "paddle"))
from polydraft_paddle import machine, runtimes, variants

EVERY = {variant.name: variant for _, variant in variants.LIST}

CASES = """
import importlib, json, sys
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
from polydraft.backend import DeviceOptions
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.conformance.harness import check_kernel, contract_of
from polydraft_paddle import open_place, polydraft_init_forward_meta, polydraft_kernels
from polydraft_paddle.kernels import state
from polydraft_paddle.provider import missing_kernel
from polydraft_paddle.variants import pack

def fused_rotary_position_embedding(q, k=None, v=None, sin=None, cos=None, position_ids=None, use_neox_rotary_style=True):
    sin, cos = (paddle.gather(t.reshape([-1, t.shape[-1]]), position_ids.reshape([-1])).unsqueeze([0, 2]) for t in (sin, cos))
    x = q.numpy()
    turned = np.empty_like(x)
    if use_neox_rotary_style:  # every two adjacent numbers
        turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    else:  # front half and back half
        half = x.shape[-1] // 2
        turned[..., :half], turned[..., half:] = -x[..., half:], x[..., :half]
    return q * cos + paddle.to_tensor(turned) * sin, None, None

def fused_linear(x, weight, bias=None, transpose_weight=False, name=None):
    return paddle.matmul(x, weight, transpose_y=transpose_weight) + bias

fused = paddle.incubate.nn.functional
paddle.set_device("cpu")
x, table = paddle.ones([1, 2, 2, 8]), paddle.ones([1, 4, 1, 8])
turn = lambda: fused.fused_rotary_position_embedding(x, sin=table, cos=table, position_ids=paddle.to_tensor([[0, 1]]))
for operation in (turn, lambda: fused.fused_linear(x[0, 0], paddle.ones([3, 8]), paddle.ones([3]), transpose_weight=True)):
    try:
        operation()
    except RuntimeError as error:
        assert missing_kernel(error), error
    else:
        raise SystemExit("the CPU place has this operation by now: run it there, and say so in docs/backends/paddle.md")
fused.fused_rotary_position_embedding, fused.fused_linear = fused_rotary_position_embedding, fused_linear
device = open_place("cpu", DeviceOptions())
backend = polydraft_kernels(device)
tables = {name: importlib.import_module(module).polydraft_kernels(device) for name, module in json.loads(sys.argv[1]).items()}
tables["state"] = pack("state", device, state.KERNELS)
for name, table in tables.items():
    table.prepare_weight, table.allocate_cache = backend.prepare_weight, backend.allocate_cache
    for contract in table.providers:
        kernel = COMPOSITES[contract] if contract in COMPOSITES else REGISTRY[contract]
        as_one = contract_of(kernel)
        cases = [*as_one.cases(), *(as_one.generate(np.random.default_rng(seed)) for seed in range(int(sys.argv[2])))]
        for case in cases:
            for init_meta in (None, polydraft_init_forward_meta):
                outcome = check_kernel(kernel, case, device, table, init_meta=init_meta)
                assert outcome.ok, (name, contract, case.name, outcome)
        print(name, contract, len(cases))
"""


def test_every_variant_is_a_pack_that_is_found_by_its_name():
    packs = pyproject()["project"]["entry-points"]["polydraft.kernels"]
    for name in EVERY:
        assert packs[name] == f"polydraft_paddle.variants.{name.partition('/')[2].replace('-', '_')}"
        assert "paddle" not in vars(importlib.import_module(packs[name])), "a pack imports Paddle when a device is open"


@needs_paddle
@pytest.mark.parametrize("seeds", [1, deep(5)])
def test_each_holds_its_contracts(seeds: int):
    packs = pyproject()["project"]["entry-points"]["polydraft.kernels"]
    run = forked(CASES, json.dumps({name: packs[name] for name in EVERY}), str(seeds))
    assert run.returncode == 0, run.stderr[-3000:]
    served: dict[str, set[str]] = {}
    for line in run.stdout.strip().splitlines():
        name, contract, count = line.rsplit(" ", 2)
        served.setdefault(name, set()).add(contract)
        assert int(count) >= seeds
    assert len(served.pop("state")) > 10, "the portable state kernels, which other places get, hold there as well"
    assert served == {name: set(variant.contracts) for name, variant in EVERY.items()}


def test_variants_are_those_of_the_place():
    assert [v.name for v in variants.variants_of("cpu")] == ["paddle/sdpa"]
    anywhere = ["paddle/fused-rope", "paddle/sdpa"]
    assert [v.name for v in variants.variants_of("gpu:1")] == ["paddle/cuda", anywhere[0], "paddle/fused-linear", anywhere[1]]
    assert [v.name for v in variants.variants_of("xpu:0")] == [name for name in EVERY if name != "paddle/fused-linear"]
    assert [v.name for v in variants.variants_of("mychip:3")] == anywhere
    assert [v.name for v in variants.variants_of("polycuda:0")] == ["paddle/cuda", *anywhere]


# -- what a result holds for ---------------------------------------------------------------------------
@pytest.fixture
def system(tmp_path: Path) -> Path:
    for number, (vendor, device) in enumerate(
        [("0x1d22", "0x3684"), ("0x10de", "0x2335"), ("0x1d22", "0x3684"), ("0x2057", "0x3686")]
    ):
        folder = tmp_path / "bus" / "pci" / "devices" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    module = tmp_path / "module" / "kunlun"
    module.mkdir(parents=True)
    (module / "version").write_text("5.0.21\n")
    return tmp_path


def test_chips_and_drivers_are_read_from_the_system(system: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "installed", lambda: {"paddlepaddle-xpu": "3.2.1"})
    library = "paddlepaddle-xpu 3.2.1"
    assert machine.runs_with("xpu:0", system) == {"device": "xpu 1d22:3684 2057:3686", "driver": "5.0.21", "library": library}
    assert machine.runs_with("gpu:0", system) == {"device": "gpu 10de:2335", "driver": "", "library": library}
    assert machine.runs_with("cpu", system) == {"device": "cpu", "driver": "", "library": library}


def test_the_driver_of_a_custom_device_is_its_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtimes, "folders", lambda: (tmp_path,))
    assert machine.runs_with("mychip:0")["driver"] == ""
    (tmp_path / "libpaddle-mychip.so").write_bytes(b"one")
    first = machine.runs_with("mychip:0")
    assert first["device"] == "mychip"
    assert first["driver"].startswith("libpaddle-mychip.so ")
    (tmp_path / "libpaddle-mychip.so").write_bytes(b"another")
    assert machine.runs_with("mychip:1")["driver"] != first["driver"]
