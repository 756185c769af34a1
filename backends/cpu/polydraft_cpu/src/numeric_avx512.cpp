// Sixteen lanes for x86 processors with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>
#include "ops.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
#define PD_LANES 16
#define PD_FMA512
#define PD_TABLE avx512_table
#define PD_NAME "avx512"
#include "numeric.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
