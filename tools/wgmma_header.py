"""Writes backends/cuda/polydraft_cuda/kernels/wgmma.cuh: an instruction that names all its registers, once for each size.

python tools/wgmma_header.py
"""

from __future__ import annotations

from pathlib import Path

SIZES = (8, 16, 32, 64, 128, 256)
HEADER = Path(__file__).resolve().parent.parent / "backends" / "cuda" / "polydraft_cuda" / "kernels" / "wgmma.cuh"
BEGIN = """\
// One warp-group product: sums[64 x TOKENS] += a[64 x 16] b[TOKENS x 16].T, both operands in shared memory, K-major (sm_90a).
//
// The instruction names all its registers, so each TOKENS has its own text; tools/wgmma_header.py writes this file.
#pragma once
#include "common.cuh"

template <int N>
__device__ __forceinline__ void accumulators_fence(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

#if ACT == 1
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

"""


def lines(items: list[str], width: int) -> list[str]:
    """The items with commas between them, `width` a line."""
    return [", ".join(items[i : i + width]) for i in range(0, len(items), width)]


def function(tokens: int) -> str:
    """The function of one size."""
    count = tokens // 2
    names, outputs = lines([f"%{i}" for i in range(count)], 16), lines([f'"+f"(r[{i}])' for i in range(count)], 8)
    text = [
        f"__device__ __forceinline__ void wgmma(float (&r)[{count}], uint64_t a, uint64_t b) {{",
        "    asm volatile(",
        '        "{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"',
        f'        "wgmma.mma_async.sync.aligned.m64n{tokens}k16." WGMMA_TYPES " {{"',
        *(f'        "{line}{", " if i < len(names) - 1 else ""}"' for i, line in enumerate(names)),
        f'        "}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"',
        *(f"        {'  ' if i else ': '}{line}{',' if i < len(outputs) - 1 else ''}" for i, line in enumerate(outputs)),
        '        : "l"(a), "l"(b)',
        '        : "memory");',
        "}",
    ]
    return "\n".join(text)


def header() -> str:
    """The whole file."""
    parts = [f"#{'elif' if i else 'if'} TOKENS == {size}\n{function(size)}\n" for i, size in enumerate(SIZES)]
    return BEGIN + "".join(parts) + "#endif\n"


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
