"""RMS norms and residual addition: alone, fused, and two norms side by side for the input of the draft.

Statistics are float32. The sum added to the residual stream is rounded before it is normalised, as if the two were launched
separately.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.packed import Rounded, rounding_defines
from polydraft_cuda.kernels.provider import Kernel, source

MOST_VECTORS = 4
"""Most 16-byte vectors of a row that a thread keeps in registers."""


def shape_of(dtype: str, width: int, pointers: tuple[Any, ...]) -> tuple[dict[str, int], int]:
    """Defines and threads for rows of `width` elements: vectors where rows, and where they start, allow it."""
    lanes = 4 if dtype == "f32" else 8
    if width % lanes or any(p.pointer % 16 for p in pointers):
        return {"VECTORS": 0, **act(dtype)}, 128
    count = width // lanes
    threads = min(512, max(32, -(-count // 32) * 32))
    vectors = -(-count // threads)
    if vectors > MOST_VECTORS:
        threads, vectors = 1024, -(-count // 1024)
    return {"VECTORS": vectors if vectors <= MOST_VECTORS else 0, **act(dtype)}, threads


def norm(device: CudaDevice, a: Any, x: Any, y: Any, *, early: bool = False) -> Launch:
    """rms_norm of x, or of x + y. With `early` x is read while the launch in front still runs."""
    width = x.shape[1]
    defines, threads = shape_of(x.dtype, width, (x, a.weight, a.out))
    function = device.function(source("norms.cu"), "rms_norm", PLUS_ONE=int(a.plus_one), EARLY=int(early), **defines)
    return function.bind(lambda n: n, threads, x, y, a.weight, a.out, width, float(a.eps), dependent=True)


def is_kept(a: Any) -> bool:
    """Whether a block keeps rows of this norm in registers."""
    return bool(shape_of(a.x.dtype, a.x.shape[1], (a.x, a.weight, a.out))[0]["VECTORS"])


def rounded(device: CudaDevice, a: Any, y: Any, project: Any, to: Rounded, *, early: bool = False) -> Launch:
    """rms_norm of x + y, or of x without y, as `project` behind it multiplies it: the norm itself is not stored. With `early` x
    is read while the launch in front still runs."""
    width = a.x.shape[1]
    defines, threads = shape_of(a.x.dtype, width, (a.x, a.weight, a.out))
    function = device.function(
        source("norms.cu"), "rounded_norm", PLUS_ONE=int(a.plus_one), EARLY=int(early), ROUNDS=1, **rounding_defines(project),
        **defines,
    )  # fmt: skip
    return function.bind(lambda n: n, threads, a.x, y, a.weight, to.x, to.scales, width, to.pitch, float(a.eps), dependent=True)


def rms_norm(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    return norm(device, a, a.x, None)


def add_and_norm(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Composite `residual_add+rms_norm`."""
    del limits, workspace
    add, normed = a.parts
    return norm(device, normed, add.x, add.y)


def add_and_norm_early(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """The same behind the projection that writes y: that lets this launch come only once it has seen what was before it, x among
    it, so that x can be read while the projection still runs."""
    del limits, workspace
    add, normed = a.parts
    return norm(device, normed, add.x, add.y, early=True)


def residual_add(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Element by element."""
    del limits, workspace
    width, lanes = a.x.shape[1], 4 if a.x.dtype == "f32" else 8
    function = device.function(source("norms.cu"), "residual_add", VECTORS=0, PLUS_ONE=0, EARLY=0, **act(a.x.dtype))
    return function.bind(
        lambda n: min(-(-n * width // (lanes * 256)), 4 * device.num_sms), 256, a.x, a.y, width, ROWS, dependent=True
    )


def combine_draft_inputs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a half row."""
    del limits, workspace
    width = a.hidden.shape[1]
    defines, threads = shape_of(a.out.dtype, width, (a.embedding, a.hidden, a.emb_norm, a.hid_norm, a.out))
    embedding_at, hidden_at = (width, 0) if a.order == "hidden_first" else (0, width)
    function = device.function(source("norms.cu"), "combine_draft_inputs", PLUS_ONE=int(a.plus_one), EARLY=0, **defines)
    return function.bind(
        lambda n: (n, 2, 1), threads, a.embedding, a.hidden, a.emb_norm, a.hid_norm, a.positions, a.out, width, embedding_at,
        hidden_at, int(a.mask_first_position), float(a.eps), dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(rms_norm),
    "residual_add": Kernel(residual_add),
    "residual_add+rms_norm": Kernel(add_and_norm),
    "combine_draft_inputs": Kernel(combine_draft_inputs),
}
