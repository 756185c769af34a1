"""Quantised KV rows on a GPU in the layout of tensor-core tiles: stored and attended to as the contracts say, drafts or not."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft.backend import CacheSpec, DeviceOptions
from polydraft.conformance.harness import check_kernel
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Case
from polydraft.contracts.compare import EPS
from polydraft.contracts.kernels import paged_attention, rope_kv_write
from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft_cuda.device import CudaDevice
from tests.device.paper import SHAPES, Shape
from tests.device.test_cuda_gpu import MANY, texts
from tests.device.test_cuda_shapes import Attention

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(600), pytest.mark.parametrize("kv", KV_DTYPES)]
init_meta: Any = polydraft_cuda.polydraft_init_forward_meta
OPTIONS = [(act, invariant) for act in ("bf16", "f16") for invariant in (False, True)]


@pytest.fixture(params=OPTIONS, ids=[f"{act}{'-invariant' * invariant}" for act, invariant in OPTIONS])
def opened(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    act, invariant = request.param
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(act, row_invariant=invariant))
    yield device
    device.close()


def held(device: CudaDevice, name: str, case: Case, kv: Any) -> None:
    table = polydraft_cuda.polydraft_kernels(device)
    found = check_kernel(REGISTRY[name], case, device, table, act=device.dtype, init_meta=init_meta, kv=kv)
    assert found.ok, found.describe()


RUNS = [(2, 37, 3), (-1, 2, 1), (0, 0, 70), (3, 15, 2), (1, 64, 1)]
"""Windows and a chunk around the borders of groups and blocks."""
TURNS: list[dict[str, Any]] = [
    {"head_dim": 128, "rope_dims": 128, "block_size": 16}, {"head_dim": 64, "rope_dims": 32, "block_size": 32, "norms": True},
    {"head_dim": 32, "rope_dims": 32, "block_size": 16, "style": "interleaved"},
    {"head_dim": 128, "rope_dims": 0, "block_size": 48},
]  # fmt: skip


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: f"{turn['head_dim']}-{turn['rope_dims']}")
def test_rows_are_turned_quantised_and_stored(opened: CudaDevice, kv: str, turn: dict[str, Any]):
    for factor in (1.0, 1e-4, 300.0):
        held(opened, "rope_kv_write", rope_kv_write._case("tiled", RUNS, factor=factor, **turn), kv)
    case = rope_kv_write._case("broken", RUNS, **turn)
    case.arrays["qkv"][5:40:7, ::61] = np.nan
    case.arrays["qkv"][9:40:7, ::53] = np.inf
    held(opened, "rope_kv_write", case, kv)


NAN = [(0, 5), (0, 33), (2, 38), (3, 16)]


@pytest.mark.parametrize("sizes", [(128, 16, 8, 2), (64, 32, 4, 1), (32, 16, 3, 3), (96, 16, 8, 1)], ids=str)
def test_rows_are_attended_to(opened: CudaDevice, kv: str, sizes: tuple[int, ...]):
    head_dim, block_size, heads, kv_heads = sizes
    own: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "heads": heads, "kv_heads": kv_heads}
    held(opened, "paged_attention", paged_attention._case("tiled", RUNS, **own), kv)
    held(opened, "paged_attention", paged_attention._case("large", RUNS, factor=30.0, **own), kv)
    held(opened, "paged_attention", paged_attention._case("keys", RUNS, nan_keys=NAN, **own), kv)
    held(opened, "paged_attention", paged_attention._case("values", RUNS, nan_values=NAN, **own), kv)
    case = paged_attention._case("magnitudes", RUNS, **own)
    cache, rng = case.arrays["cache"], np.random.default_rng(0)
    cache.v[...] *= np.exp2(rng.integers(-12, 6, cache.v.shape[:3]))[..., None]
    held(opened, "paged_attention", case, kv)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_windows_and_chunks_attend_to_quantised_rows(opened: CudaDevice, kv: str, shape: Shape):
    for contexts in ((700,), (0, 15, 16, 17, 300, 31), tuple(range(0, 160, 4))):
        seqs = [(before, 1 + i % shape.window) for i, before in enumerate(contexts)]
        attention = Attention(opened, shape, seqs, prefill=False, kv=kv)
        assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype], contexts
    attention = Attention(opened, shape, [(0, 1), (0, 64), (100, 65), (300, 130), (37, 3), (16, 16)], prefill=True, kv=kv)
    assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype]


def test_invariant_texts_over_quantised_rows_do_not_depend_on_drafts_or_batch(kv: str):
    own: dict[str, Any] = {"dtype": "bf16", "invariant": True, "kv_dtype": kv}
    alone = texts("cuda", 0, {}, MANY[:24], **own)
    drafted = texts("cuda", 3, {}, MANY[:24], max_num_seqs=32, **own)
    assert [ids for ids, _ in drafted] == [ids for ids, _ in alone]
    assert sum(sum(rounds) for _, rounds in drafted) > 0


def test_graphs_and_overlap_leave_the_text_as_it_is(kv: str):
    own: dict[str, Any] = {"dtype": "f16", "kv_dtype": kv, "invariant": True}
    wanted = texts("cuda", 3, overlap=1, graph="decode", **own)
    assert texts("cuda", 3, overlap=0, graph="off", **own) == wanted
    assert texts("cuda", 3, sanitize=True, **own) == wanted


def test_a_cache_takes_a_byte_a_number_and_one_a_row(kv: str):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    spec: Any = CacheSpec(8, 16, 4, 128, "bf16", kv=kv)  # type: ignore[arg-type]
    cache = polydraft_cuda.polydraft_kernels(device).allocate_cache(spec)
    assert cache.nbytes == 2 * 8 * 16 * 4 * (128 + 1)
    assert np.isnan(cache.read_logical()[1]).all()
    device.close()
