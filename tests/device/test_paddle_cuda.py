"""Paddle on an NVIDIA GPU: the custom device `polycuda` and the kernel pack `paddle/cuda`, held against the CUDA backend.

They need a GPU, Paddle, and `plugins/paddle-cuda-device` built against it; each in a process of its own.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import half
from tests.support.paddle import HAS_PADDLE, SITE

HAS_DEVICE = HAS_PADDLE and (Path(str(SITE.origin)).parents[1] / "paddle_custom_device" / "libpaddle-polycuda.so").exists()  # type: ignore[union-attr]
pytestmark = [
    pytest.mark.device("cuda"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not HAS_DEVICE,
        reason="the CUDA device for Paddle is not installed: pip install --no-build-isolation plugins/paddle-cuda-device",
    ),
]
PROMPT = "def fibonacci(n):"
SMALL = ("--max-new-tokens", "24", "--max-num-seqs", "2", "--max-model-len", "96", "--dtype", "f32", "--draft-tokens", "3")
PACK = ("--plugin", "polydraft_cuda.paddle_pack")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-c", "import sys; from polydraft.cli import main; sys.exit(main(sys.argv[1:]))", *arguments)


@functools.cache
def text_of(*options: str) -> tuple[list[int], list[int], int]:
    """Ids, rounds and replayed graphs."""
    done = command("generate", PROMPT, *options, *SMALL, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    request = answer["requests"][0]
    return request["token_ids"], request["rounds"], answer["totals"]["graph_replays"]


def test_every_operation_computes_what_numpy_does():
    done = run("-m", "tests.support.paddle_operations", "polycuda:0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("pack", [(), PACK], ids=["alone", "pack"])
@pytest.mark.parametrize(("overlap", "graph"), [("0", "off"), ("0", "decode"), ("1", "off"), ("1", "decode")])
def test_paddle_says_what_cuda_and_the_reference_say(pack: tuple[str, ...], overlap: str, graph: str):
    place = ("--backend", "paddle", "--device", "polycuda:0", "--overlap", overlap, "--graph", graph)
    ids, rounds, replays = text_of(*place, *pack)
    assert (ids, rounds) == text_of("--backend", "cuda")[:2]
    assert (ids, rounds) == text_of("--backend", "reference")[:2]
    assert (replays > 0) == (graph == "decode")


@pytest.mark.parametrize("pack", [(), PACK], ids=["alone", "pack"])
def test_copies_have_happened_when_their_call_returns(pack: tuple[str, ...]):
    """Level L1, again and again: a copy on the null stream once overtook what was queued behind it."""
    for _ in range(3):
        done = command("conform", "paddle", "--device", "polycuda:0", *pack, "--level", "L1")
        assert done.returncode == 0, done.stdout[-3000:]


def test_no_operation_leaves_the_place():
    """Falling back allowed, every kernel on every case: Paddle's log of chosen kernels names none of the CPU's."""
    done = run("-c", "from polydraft_paddle.probe import leaving; print(leaving('polycuda:0'))")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["{}"]


PRODUCTS = """
import paddle, polydraft_paddle_cuda as cuda
from polydraft import LLM, SamplingParams
llm = LLM(backend="paddle", device="polycuda:0", draft_tokens=3, max_num_seqs=2, max_model_len=64, dtype="bf16")
llm.generate(["def f(", "import"], [SamplingParams(max_new_tokens=12, temperature=t) for t in (0, 1)])
print(cuda.counter("library_products"), cuda.counter("own_products"))
llm.engine.close()
"""


def test_products_go_to_the_library():
    """Where cuBLASLt is installed none is left to the device's own kernel, which is right and slow."""
    done = run("-c", PRODUCTS)
    assert done.returncode == 0, done.stderr[-2000:]
    library, own = (int(count) for count in done.stdout.split()[-2:])
    assert library > 0
    assert own == 0


@pytest.mark.parametrize("kernels", [(), ("paddle/cuda",)], ids=["alone", "pack"])
def test_experts_are_chosen_by_what_16_bits_would_round(kernels: tuple[str, ...], tmp_path: Path):
    """Kernels of the pack read selection biases as float32, whatever they are."""
    parted = half.parted(half.with_close_selection_biases(tmp_path), "paddle", "polycuda:0", "bf16", kernels=kernels)
    assert all(divergence.gap < half.CLOSE["bf16"] for divergence in parted), parted


@pytest.mark.deep
@pytest.mark.parametrize("pack", [(), PACK], ids=["alone", "pack"])
def test_the_profile_with_graphs_holds(pack: tuple[str, ...], tmp_path: Path):
    done = command("conform", "paddle", "--device", "polycuda:0", *pack, "--profile", "graph", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
